# The few commands of this repository. Each is a thin alias of a script, which says what it does.
PYTHON_ENV := .venv/bin

.PHONY: up down clean-data test check bench lock format

up:
	@scripts/up

down:
	@scripts/down

clean-data:
	@scripts/down --clean-data

test:
	@scripts/test

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
