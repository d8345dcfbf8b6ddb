PYTHON ?= python3

setup:
	@$(PYTHON) tools/setup_venv.py
.PHONY: setup
