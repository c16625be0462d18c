"""The library behind the `eagle3` pipeline; imports no Prefect."""

__version__ = "0.1.0"
