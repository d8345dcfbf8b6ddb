//! Generates the client from the contract. It runs `protoc`, or what the variable PROTOC names.

fn main() -> std::io::Result<()> {
    tonic_prost_build::configure()
        .build_server(false)
        .compile_protos(
            &["../../../proto/ratelimiter/v1/ratelimiter.proto"],
            &["../../../proto"],
        )
}
