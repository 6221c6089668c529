"""What both ends of a channel must agree on: method names, size limits, keepalive.

Invariants:
- every limit is set on both sides: a message that one side may send, the other may receive;
- a server takes requests of at most 4 MiB (they are small: counters, a cursor, a list of holes)
  and answers with at most 64 MiB (a list of assignments); frames of packs are at most 4 MiB;
- either end pings the other when it has heard nothing for 10 s, also while idle, and gives a
  connection up that is silent for 5 s more; a ping every 5 s is taken;
- a connection that does not finish its handshake, or has no calls, is ended by the server;
- no HTTP proxy is used, and no two clients share a connection, so that a paused one holds up
  nobody else.
"""

from __future__ import annotations

from dataservice.wire.codec import MAX_FRAME_BYTES
from dataservice.wire.messages import COORDINATOR_METHODS

COORDINATOR_SERVICE = "dataservice.v1.Coordinator"
DATA_SERVICE = "dataservice.v1.Data"
STREAM_PACK = f"/{DATA_SERVICE}/StreamPack"

MAX_REQUEST_BYTES = 4 << 20
MAX_RESPONSE_BYTES = 64 << 20
STREAM_WINDOW_BYTES = 4 << 20
"""What a reader that pauses leaves in flight; fixed, since gRPC's own probing grows it to tens of
MiB. 4 MiB fill a link of 400 MB/s at 10 ms."""
MAX_PENDING_REQUESTS = 1 << 16
"""That the event loop has not taken yet. gRPC's own 1,000 are refused, as cancelled, when a few
thousand trainer ranks start at once."""
KEEPALIVE_S = 10
KEEPALIVE_TIMEOUT_S = 5
"""Also of data that nobody acknowledges (TCP_USER_TIMEOUT). gRPC has a limit for pings besides,
which is a minute unless it is set, and the longer one of the two holds."""

Options = list[tuple[str, int]]

_METHOD_OF: dict[type, tuple[str, type]] = {
    request: (f"/{COORDINATOR_SERVICE}/{name}", response)
    for name, (request, response) in COORDINATOR_METHODS.items()
}


def coordinator_method(request: object) -> tuple[str, type]:
    """The full method name and the response type that belong to a request message."""
    try:
        return _METHOD_OF[type(request)]
    except KeyError:
        raise TypeError(f"{type(request).__name__} is no request to the coordinator") from None


def client_options(*, max_receive_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]


COORDINATOR_OPTIONS = client_options(max_receive_bytes=MAX_RESPONSE_BYTES)
DATA_OPTIONS = [
    *client_options(max_receive_bytes=MAX_FRAME_BYTES),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
    ("grpc.http2.max_frame_size", STREAM_WINDOW_BYTES),
]

HANDSHAKE_S = 20
"""For a connection to finish TLS and to say what HTTP/2 begins with."""
MAX_SERVER_CONNECTIONS = 16_384
"""Of a server, all clients together, also those that have said nothing yet. A process has fewer
where its limit of open files is lower."""
IDLE_S = 1_800
"""Without a call; the next one connects anew."""
AGE_S = 3_600
"""With TLS: a certificate is looked at again when the connection is made anew."""
AGE_GRACE_S = 600
"""For the calls of such a connection to end."""

_SERVER_OPTIONS: Options = [
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_S * 500),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.server.max_pending_requests", MAX_PENDING_REQUESTS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_REQUESTS),
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
    ("grpc.max_allowed_incoming_connections", MAX_SERVER_CONNECTIONS),
    ("grpc.max_connection_idle_ms", IDLE_S * 1000),
]
_TLS_OPTIONS: Options = [
    ("grpc.max_connection_age_ms", AGE_S * 1000),
    ("grpc.max_connection_age_grace_ms", AGE_GRACE_S * 1000),
]


def server_options(*, tls: bool) -> Options:
    return [*_SERVER_OPTIONS, *_TLS_OPTIONS] if tls else _SERVER_OPTIONS
