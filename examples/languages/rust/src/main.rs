//! The first check in Rust: reads the address of a caller from each line, and prints what a web application would
//! answer.
//!
//!     yes 192.0.2.7 | head -7 | cargo run --quiet -- [HOST:PORT [DEADLINE_MS]]

mod limiter;

use std::error::Error;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader, stdin};

use limiter::{DEFAULT_DEADLINE, Decision, Limiter};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let target = arguments.next().unwrap_or_else(|| "127.0.0.1:9090".into());
    let deadline = match arguments.next() {
        Some(milliseconds) => Duration::from_millis(milliseconds.parse()?),
        None => DEFAULT_DEADLINE,
    };
    let limiter = Limiter::new(&target, deadline)?;
    limiter.wait_until_ready().await;
    let mut lines = BufReader::new(stdin()).split(b'\n');
    while let Some(line) = lines.next_segment().await? {
        let address = String::from_utf8_lossy(&line);
        println!("{}", answer(&limiter.check(&address, "ip", "/login").await));
    }
    Ok(())
}

/// The status that an application sends its own caller.
fn answer(decision: &Decision) -> String {
    match decision {
        Decision::FailOpen { cause } => format!("200 OK (nobody could be asked: {cause})"),
        Decision::Allowed { remaining } => format!("200 OK ({remaining} left)"),
        Decision::Invalid => "400 Bad Request".into(),
        Decision::Denied {
            retry_after_seconds,
        } => {
            format!("429 Too Many Requests (Retry-After: {retry_after_seconds})")
        }
    }
}
