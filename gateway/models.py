"""The models that the gateway serves, by the names that clients give them.

Owns the list. Each name leads to the service that runs its completions and to the replicas behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.admission import Admission
from gateway.errors import ModelNotFound, RequestError
from gateway.replica_group import ReplicaGroup
from gateway.service import Service


@dataclass(frozen=True, slots=True)
class Model:
    """One model and who serves it."""

    service: Service
    group: ReplicaGroup


class Models:
    """All models, in the order in which they are configured. They share one admission."""

    def __init__(self, models: Mapping[str, Model], admission: Admission) -> None:
        self._models = dict(models)
        self.admission = admission

    def __repr__(self) -> str:
        return f"<Models {', '.join(self._models)} {self.admission!r}>"

    @property
    def services(self) -> tuple[Service, ...]:
        return tuple(model.service for model in self._models.values())

    @property
    def groups(self) -> tuple[ReplicaGroup, ...]:
        return tuple(model.group for model in self._models.values())

    @property
    def troubles(self) -> dict[str, str]:
        """The models that nobody can serve now, each with why."""
        troubles = ((name, model.group.trouble) for name, model in self._models.items())
        return {name: trouble for name, trouble in troubles if trouble is not None}

    def service(self, model: str, sees: Callable[[str], bool]) -> Service:
        """The service of a model that its caller sees; raises `ModelNotFound`, and names no model they do not."""
        if model not in self._models or not sees(model):
            served = ", ".join(map(repr, filter(sees, self._models)))
            raise ModelNotFound(
                f"the model {model!r} does not exist; this gateway serves {served or 'none'}", param="model"
            )
        return self._models[model].service

    def service_or_only(self, model: str | None, sees: Callable[[str], bool]) -> Service:
        """The named one, or where none is named the only one; raises `ModelNotFound` or `RequestError`."""
        if model is None and len(self._models) > 1:
            raise RequestError("model is required: this gateway serves several", param="model")
        return self.service(next(iter(self._models)) if model is None else model, sees)
