"""The policy's word on a request, with its refusals in the gateway's terms."""

from __future__ import annotations

from gateway import errors
from gateway.domain import Caller
from policies.decision import Decision, NoSuchModel, NotAllowed, PolicyError, RequestFacts, Serving
from policies.policy import resolve


def decide(caller: Caller, facts: RequestFacts, serving: Serving) -> Decision:
    """What the policy gives; raises `RequestError` naming the field at fault."""
    try:
        return resolve(caller.policy, caller.tenant, facts, serving)
    except NoSuchModel as error:
        raise errors.ModelNotFound(str(error), param=error.field) from error
    except NotAllowed as error:
        raise errors.NotAllowed(str(error), param=error.field) from error
    except PolicyError as error:
        raise errors.RequestError(str(error), param=error.field) from error
