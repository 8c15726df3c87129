//! The golden cases of proto/vectors, which the clients of all languages pass.

use std::path::Path;

use base64::{Engine, engine::general_purpose::STANDARD};
use kvasir_client::proto::cachestore::v1::{BlobFrame, Digest, KvIdentity, Manifest};
use kvasir_client::{block_hash, block_hashes, digest_of, is_hash, kv_identity_hash, window_block_hash};
use prost::Message;
use serde_json::Value;

fn load(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto/vectors").join(name).with_extension("json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn cases(value: &Value) -> &Vec<Value> {
    let found = value.as_array().unwrap();
    assert!(!found.is_empty());
    found
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

fn number(value: &Value) -> u32 {
    value.as_u64().unwrap().try_into().unwrap()
}

fn texts(value: &Value) -> Vec<&str> {
    cases(value).iter().map(text).collect()
}

fn decoded(value: &Value) -> Vec<u8> {
    STANDARD.decode(text(value)).unwrap()
}

fn digest(value: &Value) -> Digest {
    Digest { hash: text(&value["hash"]).to_owned(), size_bytes: value["size_bytes"].as_i64().unwrap() }
}

fn pattern(bytes: &Value) -> Vec<u8> {
    (0..number(bytes)).map(|index| (index % 251) as u8).collect()
}

fn tokens(count: u32, first: u32) -> Vec<u32> {
    (0..count).map(|index| ((u64::from(first) + 7919 * u64::from(index)) % (1 << 31)) as u32).collect()
}

#[test]
fn digests() {
    let vectors = load("digests");
    for case in cases(&vectors["cases"]) {
        assert_eq!(digest_of(pattern(&case["pattern_bytes"]).as_slice()).unwrap(), digest(case));
    }
    for not in texts(&vectors["not_digests"]) {
        assert!(!is_hash(not), "{not:?} passed as a hash");
    }
    for case in cases(&vectors["token_hashes"]) {
        assert_eq!(digest_of(text(&case["token"]).as_bytes()).unwrap().hash, text(&case["blake3"]));
    }
}

#[test]
fn hashes_of_blocks() {
    let vectors = load("block_hashes");
    for case in cases(&vectors["cases"]) {
        let all = tokens(number(&case["token_count"]), number(&case["first_token"]));
        let found = block_hashes(text(&case["namespace"]), text(&case["kv_identity_hash"]), &all).unwrap();
        assert_eq!(found, texts(&case["block_hashes"]));
    }
    let identity = text(&vectors["cases"][0]["kv_identity_hash"]);
    for twin in cases(&vectors["twins"]["cases"]) {
        assert_eq!(block_hash(text(&twin["namespace"]), identity, None, &[1]).unwrap(), text(&twin["hash"]));
    }
    let largest: Vec<u32> = cases(&vectors["largest_token"]["token_ids"]).iter().map(number).collect();
    assert_eq!(block_hash("", identity, None, &largest).unwrap(), text(&vectors["largest_token"]["hash"]));
    assert_eq!(block_hash("", "AB", None, &[]).unwrap_err().field(), "kv_identity_hash");
    assert_eq!(block_hash("", identity, Some(""), &[]).unwrap_err().field(), "parent");
    assert!(block_hash("", &identity.to_uppercase(), None, &[]).is_err());
}

#[test]
fn hashes_of_chains() {
    let vectors = load("chain_hashes");
    let identity = text(&vectors["kv_identity_hash"]);
    let all = tokens(600, number(&vectors["first_token"]));
    let chain = block_hashes("", identity, &all).unwrap();
    assert_eq!(chain, texts(&vectors["block_chain"]));
    let tail = block_hash("", identity, Some(&chain[1]), &all[512..]).unwrap();
    assert_eq!(tail, text(&vectors["tail_of_600_tokens"]));
    assert_eq!(block_hash("", identity, None, &all[..5]).unwrap(), text(&vectors["tail_of_5_tokens"]));
}

#[test]
fn blocks_of_windows() {
    let vectors = load("window_blocks");
    for case in cases(&vectors["block_hashes"]) {
        let found = window_block_hash(text(&case["block_hash"]), number(&case["window"])).unwrap();
        assert_eq!(found, text(&case["window_block_hash"]));
    }
    let manifest = Manifest::decode(decoded(&vectors["manifest_base64"]).as_slice()).unwrap();
    assert_eq!(kv_identity_hash(&manifest.kv_identity.unwrap()).unwrap(), text(&vectors["kv_identity_hash"]));
}

#[test]
fn hashes_of_kv_identities() {
    for case in cases(&load("kv_identities")["cases"]) {
        let serialized = decoded(&case["serialized_base64"]);
        let identity = KvIdentity::decode(serialized.as_slice()).unwrap();
        assert_eq!(identity.weights_digest, text(&case["kv_identity"]["weights_digest"]));
        assert_eq!(identity.layers.len(), cases(&case["kv_identity"]["layers"]).len());
        assert_eq!(identity.encode_to_vec(), serialized, "{}", case["name"]);
        assert_eq!(kv_identity_hash(&identity).unwrap(), text(&case["kv_identity_hash"]), "{}", case["name"]);
    }
}

#[test]
fn frames() {
    let serialized = &load("frames")["serialized"];
    let frame = BlobFrame::decode(decoded(&serialized["base64"]).as_slice()).unwrap();
    assert_eq!(frame.data, pattern(&serialized["pattern_bytes"]));
    assert_eq!(digest_of(frame.data.as_slice()).unwrap(), frame.digest.unwrap());
}

#[test]
fn manifest_and_archive() {
    for name in ["manifest", "archive"] {
        let vectors = load(name);
        assert_eq!(digest_of(decoded(&vectors["base64"]).as_slice()).unwrap(), digest(&vectors["digest"]), "{name}");
    }
    let vectors = load("manifest");
    let manifest = Manifest::decode(decoded(&vectors["base64"]).as_slice()).unwrap();
    assert_eq!(manifest.token_ids.len(), number(&vectors["token_count"]) as usize);
    assert_eq!(manifest.text.chars().count(), number(&vectors["text_code_points"]) as usize);
}
