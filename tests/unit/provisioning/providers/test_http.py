"""What the error answers of each cloud's API mean, and how the key is sent."""

from __future__ import annotations

import asyncio
import functools

import pytest

from provisioning.errors import NoCapacity, OutcomeUnknown, ProviderError, Unavailable, UserError
from provisioning.providers import lambda_cloud, runpod, vast
from provisioning.providers.http import JsonApi, NotThere, Refusal

httpx = pytest.importorskip("httpx", reason="the package httpx is not installed")


def asked(monkeypatch, refusal_of, status, body, *, is_order=False, **more):
    """What a request that is answered so ends with, and the headers that it had."""
    headers = {}

    def answer(request):
        headers.update(request.headers)
        return httpx.Response(status, json=body)

    transport = httpx.MockTransport(answer)
    with monkeypatch.context() as patched:
        patched.setattr(httpx, "AsyncClient", functools.partial(httpx.AsyncClient, transport=transport))
        api = JsonApi(
            name="A cloud", url="http://cloud", key="secret", key_env="KEY", refusal_of=refusal_of, **more
        )

        async def work():
            try:
                return await api.request("POST", "/pods", {}, is_order=is_order)
            except (ProviderError, UserError) as error:
                return error
            finally:
                await api.close()

        return asyncio.run(work()), headers


def of_lambda(code):
    return {"error": {"code": code, "message": "no"}}


def of_vast(code):
    return {"success": False, "error": code, "msg": "no"}


CASES = {
    # The API, its answer, and what that is of an order, and of another request.
    "lambda: no room": (
        lambda_cloud,
        400,
        of_lambda("launch/insufficient-capacity"),
        NoCapacity,
        ProviderError,
    ),
    "lambda: other region": (
        lambda_cloud,
        400,
        of_lambda("file-system-in-wrong-region"),
        NoCapacity,
        ProviderError,
    ),
    "lambda: bad key": (lambda_cloud, 403, of_lambda("global/invalid-api-key"), UserError, UserError),
    "lambda: quota": (lambda_cloud, 400, of_lambda("global/quota-exceeded"), UserError, UserError),
    "lambda: unknown id": (
        lambda_cloud,
        400,
        of_lambda("global/object-does-not-exist"),
        NoCapacity,
        NotThere,
    ),
    "lambda: wrong field": (
        lambda_cloud,
        400,
        of_lambda("global/invalid-parameters"),
        ProviderError,
        ProviderError,
    ),
    "vast: taken": (vast, 404, of_vast("no_such_ask"), NoCapacity, NotThere),
    "vast: taken back": (vast, 410, of_vast(""), NoCapacity, ProviderError),
    "vast: no money": (vast, 400, of_vast("insufficient_credit"), UserError, UserError),
    "runpod: no room": (runpod, 400, {"title": "Bad Request"}, NoCapacity, ProviderError),
    "runpod: not for this account": (runpod, 403, {"title": "Forbidden"}, NoCapacity, UserError),
    "runpod: wrong field": (runpod, 422, {"title": "Unprocessable"}, ProviderError, ProviderError),
    "of no known form": (runpod, 404, [], NoCapacity, NotThere),
    "too fast": (lambda_cloud, 429, of_lambda("global/too-many-requests"), Unavailable, Unavailable),
    "broken": (vast, 502, of_vast("oops"), OutcomeUnknown, Unavailable),
    "unauthorized": (vast, 401, of_vast("auth_error"), UserError, UserError),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_answer_is_the_error_that_says_what_to_do(case, monkeypatch):
    module, status, body, of_order, of_request = CASES[case]
    for is_order, kind in ((True, of_order), (False, of_request)):
        error, _ = asked(monkeypatch, module._refusal, status, body, is_order=is_order)
        assert type(error) is kind, error


def test_the_key_is_sent_as_the_api_wants_it(monkeypatch):
    def refusal(status, body):
        return Refusal("no")

    answer, headers = asked(monkeypatch, refusal, 200, {"pods": []})
    assert (answer, headers["authorization"]) == ({"pods": []}, "Bearer secret")
    _, headers = asked(monkeypatch, refusal, 200, {}, key_header="api_key", key_prefix="")
    assert headers["api_key"] == "secret" and "authorization" not in headers
