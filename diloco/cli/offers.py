"""`diloco provision --offers`: what could be rented now."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from diloco.cli.pod_tables import print_offers
from diloco.cli.pods_flags import say

if TYPE_CHECKING:
    from diloco.cli.provision import WantedPods
    from provisioning.pods.pod import Offer
    from provisioning.providers.registry import Access


async def tell_offers(wanted: WantedPods, where: Access, *, as_json: bool) -> int:
    """Print what the providers offer that fits these flags; those that are not given exclude nothing."""
    from provisioning.errors import ProviderError
    from provisioning.pods.spec import PodSpec
    from provisioning.providers.backoff import repeated
    from provisioning.providers.registry import open_provider
    from provisioning.renting.plan import objections

    specs = [
        PodSpec(
            name="any",
            provider=wanted.provider,
            gpu_type=gpu_type,
            gpu_count=wanted.gpu_count,
            country=wanted.country,
            min_upload_mbps=wanted.min_upload_mbps,
            min_download_mbps=wanted.min_download_mbps,
            max_price=wanted.max_price,
            spot=True,
        )
        for gpu_type in wanted.gpu_types or (None,)
    ]
    there: list[Offer] = []
    failures: list[ProviderError] = []
    for name in specs[0].providers:
        provider = open_provider(name, where)
        try:
            # Without the check before renting: looking needs no SSH key, and no money.
            there += await repeated(provider.offers, tell=functools.partial(say, name))
        except ProviderError as error:
            failures.append(error)
            say(name, f"offers nothing now: {error}")
        finally:
            await provider.close()
    if len(failures) == len(specs[0].providers):
        raise failures[0]
    found = [one for one in there if any(not objections(spec, one) for spec in specs)]
    found.sort(key=lambda one: (one.price_per_hour, one.key))
    if as_json:
        tables = [{key: value for key, value in asdict(one).items() if key != "details"} for one in found]
        print(json.dumps(tables))
    else:
        print_offers(found)
    return 0
