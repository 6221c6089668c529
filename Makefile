.PHONY: venv trainers demo test test-slow test-clusters soak soak-client fuzz lint format dist clean

PY := .venv/bin/python

venv:
	@deploy/make_venv.sh

# What the adapters' tests run against; nothing else needs it.
trainers: venv
	@deploy/install_trainers.sh

demo: venv
	$(PY) deploy/demo.py

test: trainers
	$(PY) -m pytest -q -m "not slow and not clusters" tests

test-slow: trainers
	$(PY) -m pytest -q -m slow tests

# Slurm, machines and pods in namespaces of this machine; needs root and what deploy/install_slurm.sh installs.
test-clusters: trainers
	$(PY) -m pytest -q -m clusters tests

# An hour of random faults over a training run.
soak: venv
	$(PY) tests/chaos/run.py --minutes 60

# Client and service over 10,000 steps; takes minutes.
soak-client: venv
	$(PY) benchmarks/soak_client.py

# Five minutes a target; coverage-guided, so it takes atheris, which nothing else needs.
fuzz: venv
	.venv/bin/pip install --quiet atheris==3.0.0
	$(PY) tests/fuzz/run.py

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/codespell

format: venv
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# A wheel and a source archive below dist/.
dist: venv
	rm -rf dist
	$(PY) -m build --outdir dist .

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
