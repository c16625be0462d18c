"""What is known of a target wherever it lies: here whole, here in part, or on the hub."""

from __future__ import annotations

from eagle3_core.config import RunConfig, resolve_path
from eagle3_core.errors import TargetError
from eagle3_core.target.files import INDEX_NAME, WEIGHTS_SUFFIX, FolderFiles
from eagle3_core.target.hub import HubFiles
from eagle3_core.target.info import TargetInfo, describe_target, inspect_target
from eagle3_core.target.locate import is_builtin, is_hub_id, present_target

ON_THE_HUB = "read from the hub: a run needs the target on this machine (`hf download`)"


def look_up_target(config: RunConfig) -> tuple[TargetInfo, str | None]:
    """Facts of a run's target, and what a run would still need; weights that lie elsewhere stay there.

    Raises:
        TargetError: it is nowhere, cannot be read, or is of an unknown layout.
    """
    model = config.target.model
    try:
        files = FolderFiles(present_target(config))
    except TargetError:
        if is_builtin(model) or not is_hub_id(model):
            raise
        return _on_the_hub(config)
    sizes = files.sizes()
    has_weights = INDEX_NAME in sizes or any(name.endswith(WEIGHTS_SUFFIX) for name in sizes)
    if not has_weights and is_hub_id(model) and not resolve_path(model).is_dir():
        return _on_the_hub(config)
    info = describe_target(files)
    if not info.missing_files:
        return inspect_target(present_target(config)), None
    count = len(info.missing_files)
    return info, f"{count} of the weight files that its index names {'is' if count == 1 else 'are'} missing"


def _on_the_hub(config: RunConfig) -> tuple[TargetInfo, str]:
    return describe_target(HubFiles(config.target.model, config.target.revision)), ON_THE_HUB
