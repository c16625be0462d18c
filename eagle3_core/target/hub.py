"""Reads what is known of a target from a hub, without fetching its weights.

Of a safetensors file only the header is asked for, by range requests. Endpoint and token are those of the hub
client: HF_ENDPOINT, HF_TOKEN. Nothing is written, so that the hub cache holds no half model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from eagle3_core.errors import TargetError
from eagle3_core.target.files import Header

CONNECTIONS = 8
TIMEOUT_SECONDS = 30.0
MAX_FILE_BYTES = 128 << 20
"""Largest file that is read whole: tokenizers of large models have 20 MB."""


class HubFiles:
    """The files of a model on a hub, at one commit.

    Args:
        repository: hub id, `ORG/NAME`.
        revision: branch, tag or commit; None is the default branch.

    Raises:
        TargetError: no such model or revision, no access, or no connection.
    """

    def __init__(self, repository: str, revision: str | None = None) -> None:
        from huggingface_hub import HfApi

        self._repository = repository
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        with self._errors(repository if revision is None else f"{repository} at {revision}"):
            info = self._api.model_info(
                repository, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS
            )
        self.commit = str(info.sha)
        self._sizes = {
            file.rfilename: file.size or 0 for file in info.siblings or () if "/" not in file.rfilename
        }
        self._contents: dict[str, bytes] = {}

    @property
    def name(self) -> str:
        """The hub id."""
        return self._repository

    def sizes(self) -> dict[str, int]:
        """Bytes of each file at the top level, as the hub lists them."""
        return self._sizes

    def read(self, name: str) -> bytes | None:
        """The content of a small file, or None if there is none of that name.

        Raises:
            TargetError: no connection, or the file is not a small one.
        """
        if name not in self._sizes:
            return None
        if self._sizes[name] > MAX_FILE_BYTES:
            raise TargetError(
                f"{self.name}/{name} has {self._sizes[name]:,} bytes", expected=f"at most {MAX_FILE_BYTES:,}"
            )
        if name not in self._contents:
            self._contents[name] = self._fetch(name)
        return self._contents[name]

    def headers(self, names: Iterable[str]) -> dict[str, Header]:
        """The header of each safetensors file, several at a time.

        Raises:
            TargetError: no connection, or not a safetensors file.
        """
        wanted = list(names)
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return dict(zip(wanted, pool.map(self._header, wanted), strict=True))

    def _header(self, name: str) -> Header:
        with self._errors(f"{self.name}/{name}"):
            metadata = self._api.parse_safetensors_file_metadata(
                self._repository, name, revision=self.commit, timeout=TIMEOUT_SECONDS
            )
        return {
            tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
            for tensor, info in metadata.tensors.items()
        }

    def _fetch(self, name: str) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(self._repository, name, revision=self.commit, endpoint=self._api.endpoint)
        with self._errors(f"{self.name}/{name}"):
            response: Any = get_session().get(url, headers=build_hf_headers(), timeout=TIMEOUT_SECONDS)
            hf_raise_for_status(response)
            return response.content

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn the hub client's errors into ours, in one line."""
        from huggingface_hub import errors

        try:
            yield
        except errors.GatedRepoError as error:
            raise self._refused(
                what, "needs an accepted licence", "ask for access and set HF_TOKEN"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise self._refused(
                what, "is not on the hub or not open to you", "check the id, or set HF_TOKEN"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise self._refused(what, "has no such revision", "name a branch, tag or commit") from error
        except errors.OfflineModeIsEnabled as error:
            raise self._refused(
                what, "cannot be read in offline mode", "unset HF_HUB_OFFLINE, or name a local folder"
            ) from error
        except errors.HFValidationError as error:
            raise self._refused(what, "is no hub id", "name it ORG/NAME") from error
        except (errors.SafetensorsParsingError, errors.NotASafetensorsRepoError) as error:
            raise self._refused(what, "is not a safetensors file", None) from error
        except (OSError, errors.HTTPError) as error:
            raise self._refused(
                what, f"could not be read ({type(error).__name__}: {error})", "check the connection"
            ) from error

    def _refused(self, what: str, why: str, remedy: str | None) -> TargetError:
        return TargetError(f"{what} {why} (hub {self._api.endpoint})", remedy=remedy)
