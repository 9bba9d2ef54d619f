# `make demo` and `make test` do all the set-up.
PYTHON ?= python3
DATA ?= $(or $(PRESAGE_DATA),../shared)
BIN := .venv/bin
READY := .venv/.ready
unexport PYTHONDONTWRITEBYTECODE  # the tests start presage hundreds of times: each module is compiled once

.PHONY: demo test tests test-slow test-torch lint style types house same browser accuracy bench fuzz docs dist clean

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(READY) ## a step from code and the effect of edits, a job on 16,384 GPUs and its whole run, a replayed trace; with reports
	@mkdir -p out
	$(BIN)/presage predict examples/gpt.py:build --arg batch=8 --report out/step.html --trace out/step.json
	$(BIN)/presage whatif examples/gpt.py:build --arg batch=1 --apply bf16,cuda_graph --report out/whatif.html
	$(BIN)/presage job examples/jobs/llama3.1-405b.toml --tokens 15T --draws 10000 --report out/job.html --trace out/job.json
	$(BIN)/presage run examples/jobs/llama3.1-405b.toml --tokens 15T --deadline 60d --report out/run.html
	$(BIN)/presage replay demo --scale 'host=EmbeddingBag:0.25' --report out/replay.html --trace out/replayed.json
	@echo "Reports: out/step.html out/whatif.html out/job.html out/run.html out/replay.html (open them in a browser)"
	@echo "Timelines: out/step.json out/job.json out/replayed.json (open them in https://ui.perfetto.dev)"
	@echo "Next: $(BIN)/presage ui, a page to plan with; $(BIN)/presage --help"

test: $(READY) style browser ## style, types and all tests but the slow ones
	@$(MAKE) --no-print-directory -j 2 types tests

tests: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(READY) ## what `make test` leaves out: large jobs of the docs, accuracy that is fitted anew, whole notebooks, long ways through the page
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

test-torch: $(READY) ## the capture tests on the oldest and the newest supported torch, and their captured kernels compared
	$(BIN)/python tools/torch_versions.py

lint: style types ## style and types

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	nice -n 10 $(BIN)/mypy  # beside the tests: some of them measure times

house: $(READY) ## the rules of the layout and the sizes of all rooms
	$(BIN)/python tools/house.py

same: $(READY) ## run the recorded commands again: every number as it was (tests/same)
	$(BIN)/python tools/same.py check --data $(DATA)

browser: ## a Chromium for the browser tests; without one they are skipped
	@command -v chromium chromium-browser google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
	  || echo "no Chromium here: tests in a browser will be skipped (install the package chromium to run them)"

docs: $(READY) ## the docs as a site, in out/site
	$(BIN)/python docs/make_site.py out/site
	@echo "Open out/site/index.html"

dist: $(READY) ## wheel and sdist, in dist/
	$(BIN)/python -m build --no-isolation

fuzz: $(READY) ## broken files for every reader, files that fill the memory, kills while writing, random properties: longer than the tests do
	$(BIN)/python tools/fuzz.py --minutes 20 --out docs/hardening.md
	$(BIN)/python tools/fuzz.py --limits --out docs/hardening.md
	$(BIN)/python tools/kills.py --kills 200 --out docs/hardening.md
	HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest -n 2 --dist loadfile

accuracy: $(READY) ## reproduce every accuracy figure on the measured data and rewrite the accuracy pages of docs/
	$(BIN)/python docs/make_accuracy.py $(DATA)
	$(BIN)/python docs/make_kernels.py $(DATA)
	$(BIN)/python docs/make_labels.py $(DATA)
	$(BIN)/python docs/make_scripts.py
	$(BIN)/python docs/make_field.py
	$(BIN)/python docs/make_whatif.py $(DATA)
	$(BIN)/python docs/make_ranks.py $(DATA)
	$(BIN)/python docs/make_runs.py $(DATA)
	$(BIN)/python docs/make_memory.py $(DATA)
	$(BIN)/python docs/make_sharding.py $(DATA)
	$(BIN)/python docs/make_steps.py $(DATA)
	$(BIN)/python docs/make_placement.py $(DATA)
	$(BIN)/presage accuracy et $(DATA)/h200/workloads.py $(DATA)/h200/et $(DATA)/h200/measured.json
	$(BIN)/presage accuracy et workloads/library.py data/h200_traces data/h200_traces/measured.json
	$(BIN)/presage accuracy embeddings $(DATA)/h200/tbe_groups.json
	$(BIN)/presage accuracy sharding $(DATA)/h200/tbe_sharding.json
	$(BIN)/presage accuracy dlrm $(DATA)/runs/public_runs.csv
	$(BIN)/presage accuracy jobs $(DATA)/traces/dlrm_8xv100 $(DATA)/traces/torchrec_dlrm_4xv100

bench: $(READY) ## speed of the engine, the trace reader and predictions, next to alternatives where there are any
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/reader.py
	$(BIN)/python bench/predict.py
	$(BIN)/python bench/ranks.py
	$(BIN)/python bench/pipeline.py
	$(BIN)/python bench/jobs.py
	$(BIN)/python bench/draws.py
	$(BIN)/python bench/ui_change.py
	$(BIN)/python bench/sharding.py $(DATA)/h200/tbe_sharding.json

clean:
	rm -rf .venv out build dist
