# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
DATA ?= $(or $(PRESAGE_DATA),../shared)
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint accuracy bench clean

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(READY) ## replay a trace that ships with presage, explain it, and ask it a what-if
	@mkdir -p out
	$(BIN)/presage trace demo --top 5
	$(BIN)/presage replay demo --scale 'host=EmbeddingBag:0.25' --trace out/demo.json

test: $(READY) lint ## all tests
	$(BIN)/python -m pytest -n 2

lint: $(READY) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

accuracy: $(READY) ## re-prove every claim on the measured data and rewrite docs/accuracy.md
	$(BIN)/python docs/make_accuracy.py $(DATA)

bench: $(READY) ## speed of the engine and the trace reader beside the alternatives
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/reader.py

clean:
	rm -rf .venv out build dist
