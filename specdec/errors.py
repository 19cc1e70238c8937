"""Errors a call can end with.

Each carries the gRPC status name, a reason in capitals and what a caller needs
to mend it. Raised anywhere in a service; `specdec.rpc` turns them into
google.rpc.Status at the edge. This module imports no grpc.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field with a bad value."""

    field: str
    """Path of the field, such as `sampling.top_p`."""

    description: str
    """What is wrong, with the value given."""


class ServiceError(Exception):
    """An error with a gRPC status."""

    status = "INTERNAL"
    """Name of the grpc.StatusCode."""

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_ms: int | None = None,
    ) -> None:
        """Makes the error.

        Args:
            message: What went wrong, for people.
            reason: What went wrong, for programs; capitals and underscores.
            violations: The fields to mend.
            retry_after_ms: When another try may succeed, in ms.
        """
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.violations = violations
        self.retry_after_ms = retry_after_ms


class InvalidArgumentError(ServiceError):
    """A field's value is out of range or cannot be honoured exactly."""

    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, description: str, *, reason: str = "INVALID_VALUE") -> None:
        """Names the field and says what is wrong, with the value given."""
        violation = FieldViolation(field, description)
        super().__init__(f"{field}: {description}", reason=reason, violations=(violation,))


class AlreadyExistsError(ServiceError):
    """A live request has the same id."""

    status = "ALREADY_EXISTS"


class ResourceExhaustedError(ServiceError):
    """No room now; another try may succeed."""

    status = "RESOURCE_EXHAUSTED"


class UnavailableError(ServiceError):
    """The service cannot take work now."""

    status = "UNAVAILABLE"


class DeadlineExceededError(ServiceError):
    """The request's time ran out."""

    status = "DEADLINE_EXCEEDED"


class FailedPreconditionError(ServiceError):
    """The system is not in the state the call needs."""

    status = "FAILED_PRECONDITION"


class InternalError(ServiceError):
    """The service failed."""

    status = "INTERNAL"
