//! What the client refuses by itself, and what its errors say.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvasir_client::proto::common::v1::ErrorReason;
use kvasir_client::{At, Client, Code, Error, Tls, Turn, user};
use tonic::Status;
use tonic_types::{ErrorDetails, StatusExt};

#[tokio::test]
async fn addresses_that_are_refused() {
    for (address, field) in [
        ("", "address"),
        ("nonsense", "address"),
        ("unix:relative", "address"),
        ("unix:/a%20b", "address"),
        ("1.2.3.4:99999", "address"),
        ("1.2.3.4:0", "address"),
        ("::1:5", "address"),
        ("[::1", "address"),
        ("[name]:5", "address"),
        ("/tmp/x:1", "address"),
        ("192.0.2.1:443", "tls"),
        ("example.org:443", "tls"),
    ] {
        let error = Client::connect(address).await.unwrap_err();
        assert_eq!((error.code(), error.field()), (Code::InvalidArgument, field), "{address:?}");
    }
    for address in ["unix:/tmp/x.sock", "127.0.0.1:50051", "[::1]:50051", "localhost:50051"] {
        Client::connect(address).await.unwrap();
    }
    let error = Client::builder("localhost:50051").token("two words").connect().await.unwrap_err();
    assert_eq!((error.code(), error.reason()), (Code::Unauthenticated, ErrorReason::NoCredential));
    let error = Client::builder("example.org:443").tls(Tls::trusting("no PEM")).connect().await.unwrap_err();
    assert_eq!(error.field(), "tls");
}

#[test]
fn errors_have_what_the_service_said() {
    let metadata = HashMap::from([("head_version", "7"), ("field", "version")].map(|(key, value)| (key.into(), value.into())));
    let mut details = ErrorDetails::with_error_info("HEAD_MOVED", "kvasir", metadata);
    details.set_retry_info(Some(Duration::from_millis(1500)));
    let error = Error::from(Status::with_error_details(tonic::Code::Aborted, "moved", details));
    assert_eq!((error.code_name(), error.reason(), error.field()), ("ABORTED", ErrorReason::HeadMoved, "version"));
    assert_eq!(error.metadata(), &HashMap::from([("head_version".to_owned(), "7".to_owned())]));
    assert_eq!(error.retry_after(), Some(Duration::from_millis(1500)));
}

#[test]
fn errors_of_others_have_no_reason_of_ours() {
    let details = ErrorDetails::with_error_info("AGENT_NOT_FOUND", "proxy.example", HashMap::new());
    let error = Error::from(Status::with_error_details(tonic::Code::NotFound, "?", details));
    assert_eq!((error.reason(), error.reason_name()), (ErrorReason::NotFound, "NOT_FOUND"), "the code's own");
}

#[tokio::test]
async fn a_service_that_is_not_there_is_unavailable_and_is_not_waited_for_beyond_the_deadline() {
    let client = Client::connect("unix:/nowhere/at/all.sock").await.unwrap();
    let error = client.fork_agent("ada", "eve", At::default()).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    let began = Instant::now();
    let error = client.within(Duration::from_millis(150)).get_agent("ada").await.unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded, "between two attempts");
    assert!(began.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn what_only_a_memory_could_count_is_refused_here() {
    let client = Client::connect("unix:/nowhere/at/all.sock").await.unwrap();
    for turn in [Turn::of("ada"), Turn::append([user("a")])] {
        assert_eq!(client.count_tokens(turn).await.unwrap_err().field(), "input");
    }
}

#[tokio::test]
async fn no_debug_output_has_a_secret() {
    let tls = Tls::trusting("PEM").identity("PEM", "secret key");
    let builder = Client::builder("localhost:50051").token("secret-token").tls(tls.clone());
    let client = Client::builder("localhost:50051").token("secret-token").connect().await.unwrap();
    for text in [format!("{tls:?}"), format!("{builder:?}"), format!("{client:?}")] {
        // A list of bytes is a key, too: "secret" begins with these.
        assert!(!text.contains("secret") && !text.contains("115, 101, 99"), "{text}");
    }
}
