"""The operator's API: who is let in, and what it says and does."""

from __future__ import annotations

import pytest
from answers import error
from conftest import Gateway, launch_gateway
from toy_backend import ToyBackend

from gateway.admin.access import AdminAccess
from gateway.errors import ConfigError, NotAllowed, Unauthenticated
from gateway.settings import Settings
from policies.api_keys import new_key

KEY, KEPT = new_key()
ADMIN = {"authorization": f"Bearer {KEY}"}
STATISTICS = "/admin/v1/statistics"


# --- access


def test_the_admin_key_opens() -> None:
    access = AdminAccess(KEPT.hash)
    access.check(f"Bearer {KEY}")
    access.check(f"bearer  {KEY} ")
    assert repr(access) == "<AdminAccess by key>"


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {new_key()[0]}"]
)
def test_nothing_else_does(authorization: str | None) -> None:
    with pytest.raises(Unauthenticated) as caught:
        AdminAccess(KEPT.hash).check(authorization)
    assert KEY not in str(caught.value)


def test_without_a_key_nobody_is_let_in() -> None:
    with pytest.raises(NotAllowed, match="verbatim keys new"):
        AdminAccess(None).check(f"Bearer {KEY}")


def test_the_setting_is_a_hash_and_is_never_shown() -> None:
    settings = Settings("http://x", admin_key=KEPT.hash)
    assert KEPT.hash not in repr(settings)
    with pytest.raises(ConfigError) as caught:
        Settings("http://x", admin_key=KEY)
    assert caught.value.param == "admin_key"
    assert KEY not in str(caught.value)


async def test_a_gateway_without_an_admin_key_says_how_to_set_one(gateway: Gateway) -> None:
    said = error(await gateway.http.get(STATISTICS, headers=ADMIN), 403)
    assert said["code"] == "not_allowed"
    assert "--admin-key" in said["message"]


async def test_the_admin_key_is_no_tenants_key(toy: ToyBackend) -> None:
    async with launch_gateway(toy.url, admin_key=KEPT.hash) as gateway:
        assert (await gateway.http.get(STATISTICS, headers=ADMIN)).status_code == 200
        refused = await gateway.http.get(STATISTICS)
        assert error(refused, 401)["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert error(await gateway.chat(headers=ADMIN), 401)["code"] == "invalid_api_key"


# --- statistics


async def test_statistics(toy: ToyBackend) -> None:
    async with launch_gateway(toy.url, admin_key=KEPT.hash) as gateway:
        said = (await gateway.http.get(STATISTICS, headers=ADMIN)).json()
        assert said["logs"] == {
            "memory": {"logs": 0, "bytes": 0},
            "served": {"hit": 0, "follow": 0, "lead": 0},
            "conflicts": 0,
        }
        (model,) = said["models"]
        assert (model["model"], model["fingerprint"], model["trouble"]) == ("toy", "toy-1", None)
        assert model["replicas"] == [
            {"url": toy.url, "fingerprint": "toy-1", "trouble": None, "belongs": True, "in_flight": 0}
        ]
