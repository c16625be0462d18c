"""Imports vLLM where it is imported: what `engine_forks` forks processes from."""

from benchmarks.engine_import import import_engine

import_engine("vllm")
