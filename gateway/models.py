"""The models that the gateway serves, by the names that clients give them.

Owns the list. Each name leads to the service that runs its completions and to the replicas behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gateway.admission import Admission
from gateway.backends.replica_group import ReplicaGroup
from gateway.backends.upstream import UpstreamGroup
from gateway.errors import ModelNotFound, RequestError, RoleRefused
from gateway.service import Service


@dataclass(frozen=True, slots=True)
class Model:
    """One model and who serves it: replicas under a service, upstreams, or both."""

    name: str
    service: Service | None = None
    group: ReplicaGroup | None = None
    upstreams: UpstreamGroup | None = None

    @property
    def max_context(self) -> int | None:
        """None where only upstreams know."""
        return None if self.service is None else self.service.info.max_context


class Models:
    """All models, in the order in which they are configured. They share one admission."""

    def __init__(self, models: Sequence[Model], admission: Admission) -> None:
        self._models = {model.name: model for model in models}
        self.upstreams = {model.name: model.upstreams for model in models if model.upstreams is not None}
        self.admission = admission

    def __repr__(self) -> str:
        return f"<Models {', '.join(self._models)} {self.admission!r}>"

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    @property
    def groups(self) -> tuple[ReplicaGroup, ...]:
        return tuple(model.group for model in self if model.group is not None)

    def verifies(self, name: str) -> bool:
        """Whether somebody verifies for a model that is served."""
        group = self._models[name].group
        return group is not None and "verify" in group.roles

    @property
    def troubles(self) -> dict[str, str]:
        """The models that nobody can serve now, each with why."""
        # Upstreams are not asked how they are: there is no common way to.
        troubles = ((group.model, group.trouble) for group in self.groups)
        return {model: trouble for model, trouble in troubles if trouble is not None}

    def model(self, name: str, sees: Callable[[str], bool]) -> Model:
        """A model that its caller sees; raises `ModelNotFound`, and names no model they do not."""
        if name not in self._models or not sees(name):
            served = ", ".join(map(repr, filter(sees, self._models)))
            raise ModelNotFound(
                f"the model {name!r} does not exist; this gateway serves {served or 'none'}", param="model"
            )
        return self._models[name]

    def service(self, name: str, sees: Callable[[str], bool]) -> Service:
        """Raises `ModelNotFound` too, and `RoleRefused` where there are only upstreams."""
        service = self.model(name, sees).service
        if service is None:
            raise RoleRefused(f"the model {name!r} is served by upstream servers alone, in mode off", param="model")
        return service

    def service_or_only(self, model: str | None, sees: Callable[[str], bool]) -> Service:
        """The named one, or where none is named the only one; raises `ModelNotFound` or `RequestError`."""
        if model is None and len(self._models) > 1:
            raise RequestError("model is required: this gateway serves several", param="model")
        return self.service(next(iter(self._models)) if model is None else model, sees)
