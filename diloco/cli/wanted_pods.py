"""The flags of `diloco provision` that say which pods are wanted."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from diloco.cli.pods_flags import Words
from diloco.errors import UserError
from diloco.options.checks import at_least, finite, not_empty, whole
from provisioning.providers.registry import LISTED

if TYPE_CHECKING:
    from provisioning.pods.spec import PodSpec

Number = Annotated[int | None, Parameter(converter=whole, validator=at_least(1))]
Hours = Annotated[float | None, Parameter(validator=(at_least(0.01), finite))]
Amount = Annotated[float | None, Parameter(validator=(at_least(0), finite))]


@dataclass(frozen=True, kw_only=True)
class WantedPods:
    """Which pods, in the words of PodSpec. What is not given is as is usual for their provider."""

    pods: Number = None
    """Number of pods."""
    file: Path | None = None
    """Instead: a TOML file with [[pods]]."""
    provider: Annotated[str, Parameter(help=f"{LISTED}; or several: lium,runpod.", validator=not_empty)] = (
        "local"
    )
    gpu_type: Words = ()
    """GPU types that the pods take in turn: A100,H100,4090; default A100, for local pods cpu-1."""
    gpu_count: Number = None
    """GPUs of each pod; default 8, for local pods and machines you own whatever they have."""
    country: str | None = None
    """Two letters, such as NL."""
    volume_id: str | None = None
    """A volume of the provider's to attach."""
    ttl_hours: Hours = None
    """Hours after which pods are given back by themselves."""
    min_upload_mbps: Amount = None
    """Upload bandwidth that an offer must have."""
    min_download_mbps: Amount = None
    """Download bandwidth that an offer must have."""
    max_price: Amount = None
    """Dollars per hour that a pod may cost."""
    image: str | None = None
    """Container image or template, where the provider takes one."""
    spot: Annotated[bool, Parameter(negative="")] = False
    """Also rent machines that the provider may take back at any time."""

    @property
    def gpu_types(self) -> list[str]:
        return [name for words in self.gpu_type for name in words.split(",") if name]


def specs_of_flags(wanted: WantedPods) -> list[PodSpec]:
    """Raises UserError."""
    from provisioning.pods.spec import read_toml, specs_of, tables_in

    if (wanted.pods is None) == (wanted.file is None):
        raise UserError("Say which pods: --pods 3, or --file FILE with [[pods]]; one of the two.")
    common = {item.name: getattr(wanted, item.name) for item in fields(wanted)}
    for name in ("pods", "file", "gpu_type"):
        del common[name]
    # A switch that is off is one that was not given: a table may say yes.
    common["spot"] = wanted.spot or None
    origin = "--pods"
    tables: list[dict[str, Any]] = [{}] * (wanted.pods or 0)
    if wanted.file is not None:
        origin = str(wanted.file)
        tables = tables_in(read_toml(wanted.file), "pods", origin)
    return specs_of(tables, origin, gpu_types=wanted.gpu_types, **common)
