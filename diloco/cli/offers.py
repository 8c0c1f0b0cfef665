"""`diloco provision --offers`: lists what can be rented now."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from diloco.cli.pod_tables import print_offers
from diloco.cli.pods_flags import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from provisioning.pods.pod import PodSpec
    from provisioning.providers.registry import Access


async def tell_offers(specs: Sequence[PodSpec], where: Access, *, as_json: bool) -> int:
    """Print the offers that fit one of these specs, all of which name the same providers."""
    from provisioning.providers.registry import open_provider
    from provisioning.renting.plan import objections
    from provisioning.renting.renters import offers_of

    async with contextlib.AsyncExitStack() as opened:
        providers = []
        for name in specs[0].providers:
            providers.append(open_provider(name, where))
            opened.push_async_callback(providers[-1].close)
        # Without the checks that come before renting: listing offers needs neither an SSH key nor money.
        there = await offers_of(providers, say)
    found = [one for one in there if any(not objections(spec, one) for spec in specs)]
    found.sort(key=lambda one: (one.price_per_hour, one.key))
    if as_json:
        tables = [{key: value for key, value in asdict(one).items() if key != "details"} for one in found]
        print(json.dumps(tables))
    else:
        print_offers(found)
    return 0
