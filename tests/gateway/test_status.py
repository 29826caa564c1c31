"""What /admin/v1/status says, against what was asked of the gateway."""

from __future__ import annotations

from typing import Any

import pytest
from answers import error
from launched import Gateway, launch_gateway
from toy_backend import ToyBackend
from toy_model import EOS, ToyModel, ids

from policies.api_keys import new_key
from policies.document import FixedPolicy
from policies.loader import load_policy

KEY, KEPT = new_key()
ADMIN = {"authorization": f"Bearer {KEY}"}
CACHING = FixedPolicy(load_policy("version: 1\nanonymous: a\ntenants: {a: {cache: {scope: tenant}}}\n", "policy.yaml"))


def wrong_at_four(truth: list[int], count: int) -> list[int]:
    return [(id_ + 1) % 256 if place == 3 else id_ for place, id_ in enumerate(truth)]


async def status(gateway: Gateway) -> dict[str, Any]:
    response = await gateway.http.get("/admin/v1/status", headers=ADMIN)
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


async def test_it_sums_up_what_was_asked() -> None:
    toy = ToyBackend(model=ToyModel([*ids("as it was before"), EOS]), drafter=wrong_at_four)
    async with toy, launch_gateway(toy.url, policies=CACHING, admin_key=KEPT.hash) as gateway:
        nothing = await status(gateway)
        assert nothing["modes"] == {} and nothing["refusals"] == {}
        assert nothing["policy"] == CACHING.current.version
        assert sum(nothing["work"]["rolled_back_at"]["counts"]) == 0

        for _ in range(2):
            assert (await gateway.chat(is_deterministic=True)).status_code == 200
        assert (await gateway.chat(max_tokens=5)).status_code == 200
        assert (await gateway.chat(temperature=9)).status_code == 400

        some = await status(gateway)
        assert some["up_s"] > nothing["up_s"]
        assert set(some["modes"]) == {"off", "verified"}
        verified, off = some["modes"]["verified"], some["modes"]["off"]
        assert verified["requests"] == {"2xx": 2} and off["requests"] == {"2xx": 1}
        assert off["tokens"]["completion"] == 5
        assert sum(verified["first_token_s"]["counts"]) == 2
        assert len(verified["first_token_s"]["counts"]) == len(verified["first_token_s"]["bounds"]) + 1
        assert some["logs"]["served"] == {"hit": 1, "follow": 0, "lead": 1}

        work = some["work"]
        rolled_back = work["windows"]["rolled_back"]
        assert rolled_back > 0
        assert sum(work["rolled_back_at"]["counts"]) == rolled_back
        # The verifier says the first token itself, and the draft behind it is wrong in its fourth.
        bounds = work["rolled_back_at"]["bounds"]
        first = next(index for index, count in enumerate(work["rolled_back_at"]["counts"]) if count)
        assert bounds[first - 1] < 4 <= bounds[first]
        (model,) = some["models"]
        (replica,) = model["replicas"]
        assert replica["well"] and replica["roles"] == ["draft", "verify"]
        assert replica["fingerprint"] == model["fingerprint"]


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer sk-none"}, {"authorization": f"Basic {KEY}"}])
async def test_it_is_the_operators_alone(toy: ToyBackend, headers: dict[str, str]) -> None:
    async with launch_gateway(toy.url, admin_key=KEPT.hash) as gateway:
        error(await gateway.http.get("/admin/v1/status", headers=headers), 401)
    async with launch_gateway(toy.url) as gateway:
        assert "verbatim keys new" in str(error(await gateway.http.get("/admin/v1/status", headers=ADMIN), 403))
