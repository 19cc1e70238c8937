"""Errors of `specdec.errors` as gRPC statuses with google.rpc details."""

from __future__ import annotations

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status  # type: ignore[import-untyped]

from specdec.errors import ServiceError

DOMAIN = "specdec.v1"


def status_code_of(error: BaseException) -> grpc.StatusCode:
    """The status a call ends with when its handler raises this."""
    if isinstance(error, ServiceError):
        return grpc.StatusCode[error.status]
    return grpc.StatusCode.INTERNAL


def to_status(error: ServiceError) -> grpc.Status:
    """The whole status: code, message and details.

    Args:
        error: What a handler raised.

    Returns:
        A status with ErrorInfo and, where they fit, BadRequest and RetryInfo.
    """
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad_request.field_violations.add(
                field=violation.field, description=violation.description
            )
        details.append(bad_request)
    if error.retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        details.append(retry)
    status = status_pb2.Status(code=status_code_of(error).value[0], message=error.message)
    for detail in details:
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)
    converted: grpc.Status = rpc_status.to_status(status)
    return converted
