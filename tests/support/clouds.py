"""Every cloud provider, with the emulator of its API."""

from __future__ import annotations

import getpass
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from provisioning.pods.pod import Pod
from provisioning.providers.cloud import Cloud
from provisioning.providers.lambda_cloud import LambdaProvider
from provisioning.providers.lium import LiumProvider
from provisioning.providers.runpod import RunPodProvider
from provisioning.providers.vast import VastProvider
from tests.support.http_api import HttpApi
from tests.support.lambda_api import LambdaApi
from tests.support.lium_api import LiumApi, executor
from tests.support.runpod_api import RunPodApi
from tests.support.vast_api import VastApi


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """An emulated cloud, and the beginnings of the requests that tests make fail."""

    make_api: Callable[..., HttpApi]
    provider: type[Cloud]
    orders: str
    lists: str
    shows: str
    """The request for one pod, without its id."""


def _lium(hosts: Any) -> HttpApi:
    return LiumApi([executor("NVIDIA A100-SXM4-80GB", 2, 1.2, smallest=1)], hosts)


class LoopbackLambda(LambdaProvider):
    """Without rate limits, which have tests of their own. Machines on loopback differ by their SSH ports."""

    interval_s = order_interval_s = 0.0
    user = getpass.getuser()

    def pod_in(self, found: Any) -> Pod | None:
        pod = super().pod_in(found)
        return pod and replace(pod, ssh_port=found.get("ssh_port", 22))


class LoopbackVast(VastProvider):
    user = getpass.getuser()


CLOUDS = {
    "lium": Emulated(
        make_api=_lium,
        provider=LiumProvider,
        orders="POST /executors/",
        lists="GET /pods",
        shows="GET /pods/",
    ),
    "lambda": Emulated(
        make_api=LambdaApi,
        provider=LoopbackLambda,
        orders="POST /instance-operations/launch",
        lists="GET /instances",
        shows="GET /instances/",
    ),
    "runpod": Emulated(
        make_api=RunPodApi,
        provider=RunPodProvider,
        orders="POST /pods",
        lists="GET /pods",
        shows="GET /pods/",
    ),
    "vast": Emulated(
        make_api=VastApi,
        provider=LoopbackVast,
        orders="PUT /v0/asks/",
        lists="GET /v1/instances/",
        shows="GET /v0/instances/",
    ),
}
