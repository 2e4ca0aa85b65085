"""How many spares there should be: laws of the choice, and the stories it was made for."""

from hypothesis import given
from hypothesis import strategies as st

from space.node.demand import FADES_S, IN_DEMAND_S, Demand, Shape, targets

SHAPES = [Shape(f"sha256:{n:064d}", "fake", 256) for n in range(5)]


def asked(times: int, at: float = 0.0, *, always: bool = False) -> Demand:
    demand = Demand(always)
    for _ in range(times):
        demand.ask(at)
    return demand


def aims(demands: dict[Shape, Demand], now: float = 0.0, **changes: int) -> dict[Shape, int]:
    return targets(demands, now, **{"count_min": 1, "count_max": 16, "count_all": 100, **changes})


def test_nothing_is_kept_of_what_nobody_asks_for_but_of_what_always_is():
    assert aims({SHAPES[0]: Demand(), SHAPES[1]: Demand(always=True)}) == {SHAPES[0]: 0, SHAPES[1]: 1}


def test_the_target_follows_what_was_asked_for_lately_and_fades():
    demand = asked(8)
    assert aims({SHAPES[0]: demand})[SHAPES[0]] == 9
    assert aims({SHAPES[0]: demand}, FADES_S)[SHAPES[0]] == 4
    assert aims({SHAPES[0]: demand}, 5 * FADES_S)[SHAPES[0]] == 1
    assert aims({SHAPES[0]: demand}, IN_DEMAND_S + 1)[SHAPES[0]] == 0
    assert aims({SHAPES[0]: asked(500)})[SHAPES[0]] == 16


def test_what_was_asked_for_once_is_soon_forgotten_and_twice_is_demand():
    once, twice = asked(1), asked(1)
    twice.ask(FADES_S)
    assert aims({SHAPES[0]: once}, FADES_S)[SHAPES[0]] >= 1
    assert aims({SHAPES[0]: once}, FADES_S + 1)[SHAPES[0]] == 0
    assert aims({SHAPES[0]: twice}, IN_DEMAND_S)[SHAPES[0]] == 1


def test_what_is_asked_for_least_goes_short_first():
    demands = {SHAPES[0]: asked(2), SHAPES[1]: asked(6), SHAPES[2]: asked(1)}
    assert aims(demands, count_all=12) == {SHAPES[1]: 7, SHAPES[0]: 3, SHAPES[2]: 2}
    assert aims(demands, count_all=9) == {SHAPES[1]: 7, SHAPES[0]: 1, SHAPES[2]: 1}
    assert aims(demands, count_all=2) == {SHAPES[1]: 1, SHAPES[0]: 1, SHAPES[2]: 0}
    assert aims(demands, count_all=0) == dict.fromkeys(SHAPES[:3], 0)


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    now=st.floats(0, 1000),
    count_min=st.integers(0, 5),
    more=st.integers(0, 20),
    count_all=st.integers(0, 60),
)
def test_no_bound_is_ever_exceeded(counts, now, count_min, more, count_all):
    demands = {shape: asked(count) for shape, count in zip(SHAPES, counts, strict=False)}
    found = aims(demands, now, count_min=count_min, count_max=count_min + more, count_all=count_all)
    assert found.keys() == demands.keys()
    assert sum(found.values()) <= count_all
    assert all(0 <= count <= count_min + more for count in found.values())
    for one, count in found.items():
        for other, others in found.items():
            if demands[one].score(now) > demands[other].score(now):
                assert count >= others or demands[one].wanted(now, count_min, count_min + more) == count
