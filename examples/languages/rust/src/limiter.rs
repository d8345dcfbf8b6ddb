//! Asks a ratelimitd node whether a request may proceed, and answers itself when the node does not.

use std::time::Duration;

use tonic::transport::{Channel, Endpoint, Error};
use tonic::{Code, Request, Response, Status};

use pb::rate_limiter_client::RateLimiterClient;
use pb::{RateLimitRequest, RateLimitResponse, Reason};

mod pb {
    tonic::include_proto!("ratelimiter.v1");
}

/// How long a check may take before the request is let through.
pub const DEFAULT_DEADLINE: Duration = Duration::from_millis(20);

const READY_DEADLINE: Duration = Duration::from_secs(1);

/// Of the contract. What is longer never becomes an error of the transport, which would let the request through.
const MAX_IDENTIFIER_BYTES: usize = 256;

/// The answer to a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    Allowed {
        remaining: i32,
    },
    Denied {
        retry_after_seconds: i32,
    },
    /// Let through unchecked, by this limiter or by the node: the gRPC status, or the reason, by its name.
    FailOpen {
        cause: String,
    },
    /// The check was malformed. It is to be denied: bad input opens nothing.
    Invalid,
}

/// The connection to a node. Clones share it, so that one serves the whole process, and all its tasks.
#[derive(Clone)]
pub struct Limiter {
    checks: RateLimiterClient<Channel>,
    deadline: Duration,
}

impl Limiter {
    /// Connects with its first check, or in `wait_until_ready`; must be called in a Tokio runtime.
    ///
    /// The target is `host:port`. It is an error if it is no address.
    pub fn new(target: &str, deadline: Duration) -> Result<Self, Error> {
        let channel = Endpoint::from_shared(format!("http://{target}"))?
            .connect_timeout(Duration::from_secs(1))
            // A dead connection is found although nobody asks.
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(5))
            .keep_alive_while_idle(true)
            // There is no back-off to set: with no connection, each check tries to connect.
            .connect_lazy();
        Ok(Self {
            checks: RateLimiterClient::new(channel),
            deadline,
        })
    }

    /// Connects, for a second at most, by a check that charges nothing. Await it at start, so that the first check
    /// need not connect within its deadline.
    pub async fn wait_until_ready(&self) {
        let request = RateLimitRequest {
            identifier: "ready".into(),
            identifier_type: "user".into(),
            endpoint: "/".into(),
            peek: true,
            ..Default::default()
        };
        // Without an answer, checks are let through until there is a node.
        let _ = self.ask(request, READY_DEADLINE).await;
    }

    /// Asks for one token. It returns within the deadline, whatever becomes of the node.
    ///
    /// As `endpoint` pass the template of a route and never the path, which would get a bucket of its own.
    pub async fn check(&self, identifier: &str, identifier_type: &str, endpoint: &str) -> Decision {
        if identifier.is_empty() || identifier.len() > MAX_IDENTIFIER_BYTES {
            return Decision::Invalid;
        }
        let request = RateLimitRequest {
            identifier: identifier.into(),
            identifier_type: identifier_type.into(),
            endpoint: endpoint.into(),
            ..Default::default()
        };
        match self.ask(request, self.deadline).await {
            Ok(answer) => decision(&answer.into_inner()),
            Err(status) if status.code() == Code::InvalidArgument => Decision::Invalid,
            Err(status) => Decision::FailOpen {
                cause: format!("NO_ANSWER {:?}", status.code()),
            },
        }
    }

    async fn ask(
        &self,
        request: RateLimitRequest,
        deadline: Duration,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let mut request = Request::new(request);
        request.set_timeout(deadline); // tells the node
        // Tonic's own timeout begins when there is a connection, so it would not end a wait for one.
        tokio::time::timeout(deadline, self.checks.clone().check_rate_limit(request))
            .await
            .unwrap_or_else(|_| Err(Status::deadline_exceeded("")))
    }
}

fn decision(answer: &RateLimitResponse) -> Decision {
    match answer.reason() {
        // A node that is set to deny answers FAIL_OPEN_BREAKER, too.
        reason @ (Reason::FailOpenBreaker | Reason::FailOpenError) if answer.allowed => {
            Decision::FailOpen {
                cause: reason.as_str_name().into(),
            }
        }
        Reason::InvalidRequest => Decision::Invalid,
        _ if answer.allowed => Decision::Allowed {
            remaining: answer.remaining_tokens,
        },
        _ => Decision::Denied {
            retry_after_seconds: answer.retry_after_seconds,
        },
    }
}
