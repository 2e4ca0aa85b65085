# The few commands of this repository. Each is a thin alias of a script, which says what it does.
PYTHON_ENV := .venv/bin

.PHONY: up down clean-data test test-long test-qemu test-kvm chaos soak check bench lock format

up:
	@scripts/up

down:
	@scripts/down

clean-data:
	@scripts/down --clean-data

test:
	@scripts/test

# Claims of make test again at their full size (gigabytes, twenty snapshots of snapshots, thousands of processes), and
# the guides whose code takes minutes.
test-long:
	@scripts/test -m long tests/system

# The contract of drivers, then the suites of system and security, on virtual machines with emulated processors: an hour.
test-qemu:
	@scripts/test-qemu

# What is tested of Firecracker, with a real one under its jailer: that of SPACE_FIRECRACKER, or one fetched for that.
test-kvm:
	@scripts/test-kvm

# Hours of trouble in minutes, on an installation of their own: SIGKILLs at random moments, and a steady load.
chaos: $(PYTHON_ENV)/ruff
	@$(PYTHON_ENV)/python -m tests.chaos.rounds

soak: $(PYTHON_ENV)/ruff
	@$(PYTHON_ENV)/python -m tests.chaos.soak

bench:
	@scripts/bench

check: $(PYTHON_ENV)/ruff
	@$(PYTHON_ENV)/ruff check src tests benchmarks scripts
	@$(PYTHON_ENV)/ruff format --check src tests benchmarks
	@$(PYTHON_ENV)/basedpyright src
	@$(PYTHON_ENV)/lint-imports

format: $(PYTHON_ENV)/ruff
	@$(PYTHON_ENV)/ruff check --fix src tests benchmarks
	@$(PYTHON_ENV)/ruff format src tests benchmarks

lock:
	@scripts/lock

$(PYTHON_ENV)/ruff: requirements-dev.lock
	@scripts/dev-env
