"""The protocol: `tpengine.proto`, its stubs, and names that server and client share."""

SERVICE = "tpengine.v1.GenerationService"
LIVENESS = "liveness"
"""Name in grpc.health.v1: the process serves, and its engine can continue."""
READINESS = "readiness"
"""Name in grpc.health.v1: the model is loaded, and the engine is idle or its steps advance."""
TIMEOUT_KEY = "x-timeout-ms"
"""Metadata of a call: its deadline in milliseconds from now. gRPC's own deadline ends a call on
both sides at the same moment, so the server's error text is usually lost. The client therefore
names the deadline here and gives gRPC a later one."""
REQUEST_ID_KEY = "x-request-id"
"""Initial metadata of an answer: the id of its request."""
RESUME_WINDOW_KEY = "x-resume-window"
"""Seconds for which a stream without a reader is kept: initial metadata over gRPC; over HTTP a
header of the request, in which the client asks for them, and of the answer."""
STATUS_DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata: the `google.rpc.Status` of gRPC's richer error model."""
