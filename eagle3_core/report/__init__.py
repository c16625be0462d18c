"""The run report: `summary.json` and `report.html` from a run folder and the store's manifests."""
