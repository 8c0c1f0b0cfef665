"""Every provider that is a cloud, as its emulator knows it."""

from __future__ import annotations

import getpass
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provisioning.providers.lambda_cloud import LambdaProvider
from provisioning.providers.lium import LiumProvider
from provisioning.providers.protocol import Provider
from provisioning.providers.runpod import RunPodProvider
from provisioning.providers.vast import VastProvider
from tests.support.http_api import HttpApi
from tests.support.lambda_api import LambdaApi
from tests.support.lium_api import LiumApi, executor
from tests.support.runpod_api import RunPodApi
from tests.support.vast_api import VastApi


@dataclass(frozen=True)
class Cloud:
    """One of them, and the requests that tests spoil."""

    make_api: Callable[..., HttpApi]
    make_provider: Callable[[dict[str, str], Path], Provider]
    key: str
    url: str
    orders: str
    lists: str
    take_all: Callable[[Any], None]
    """Nothing of what was offered can be had any more."""


def _take_hosts(api: Any) -> None:
    api.free_hosts.clear()


def _lium(hosts: Any) -> HttpApi:
    return LiumApi([executor("NVIDIA A100-SXM4-80GB", 2, 1.2, smallest=1)], hosts)


class LoopbackLambda(LambdaProvider):
    """As fast as loopback allows; the API's own limits are tested apart."""

    interval_s = order_interval_s = 0.0
    user = getpass.getuser()


class LoopbackVast(VastProvider):
    user = getpass.getuser()


CLOUDS = {
    "lium": Cloud(
        _lium, LiumProvider, "LIUM_API_KEY", "LIUM_BASE_URL", "POST /executors/", "GET /pods", _take_hosts
    ),
    "lambda": Cloud(
        *(LambdaApi, LoopbackLambda, "LAMBDALABS_API_KEY", "LAMBDALABS_BASE_URL"),
        *("POST /instance-operations/launch", "GET /instances", _take_hosts),
    ),
    "runpod": Cloud(
        *(RunPodApi, RunPodProvider, "RUNPOD_API_KEY", "RUNPOD_BASE_URL"),
        *("POST /pods", "GET /pods", _take_hosts),
    ),
    "vast": Cloud(
        *(VastApi, LoopbackVast),
        *("VAST_API_KEY", "VAST_BASE_URL", "PUT /v0/asks/", "GET /v1/instances/", _take_hosts),
    ),
}
