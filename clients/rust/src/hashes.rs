//! Digests and block hashes, byte for byte as proto/README.md has them.

use std::io;

use crate::errors::{Error, Result};
use crate::proto::cachestore::v1::{Digest, KvIdentity};

/// Tokens of a full block.
pub const BLOCK_TOKENS: usize = 256;

const BLOCK_TAG: &[u8] = b"kvasir.block.v1";
const WINDOW_TAG: &[u8] = b"kvasir.window_block.v1";
const IDENTITY_TAG: &[u8] = b"kvasir.kv_identity.v1";
const STATES_TAG: &[u8] = b"states";
const PIECE_BYTES: usize = 1 << 16;

/// The digest of all bytes of a reader: their BLAKE3-256 as 64 lower-case hex digits, and their number.
///
/// # Errors
/// The reader's.
pub fn digest_of(mut data: impl io::Read) -> io::Result<Digest> {
    let mut hasher = Hasher::default();
    let mut buffer = vec![0; PIECE_BYTES];
    loop {
        match data.read(&mut buffer) {
            Ok(0) => return Ok(hasher.digest()),
            Ok(count) => hasher.write(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// True for exactly 64 lower-case hex digits.
#[must_use]
pub fn is_hash(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Names a block: of a namespace, a KV identity, the block hash of the block before (`None` for the first) and the tokens.
///
/// # Errors
/// INVALID_ARGUMENT for what is no hash.
pub fn block_hash(namespace: &str, kv_identity_hash: &str, parent: Option<&str>, token_ids: &[u32]) -> Result<String> {
    let identity = raw_hash("kv_identity_hash", kv_identity_hash)?;
    let before = parent.map(|parent| raw_hash("parent", parent)).transpose()?;
    let before = before.as_ref().map_or(&[][..], |hash| hash.as_bytes());
    let tokens = numbers(token_ids.iter().copied());
    Ok(hash_fields(&[BLOCK_TAG, namespace.as_bytes(), identity.as_bytes(), before, &tokens]))
}

/// Names the full blocks of tokens, first block first; tokens behind the last full block have no hash. With an empty namespace
/// they are the chain hashes of tensor files.
///
/// # Errors
/// INVALID_ARGUMENT for what is no hash.
pub fn block_hashes(namespace: &str, kv_identity_hash: &str, token_ids: &[u32]) -> Result<Vec<String>> {
    let mut hashes: Vec<String> = Vec::with_capacity(token_ids.len() / BLOCK_TOKENS);
    for block in token_ids.chunks_exact(BLOCK_TOKENS) {
        let parent = hashes.last().map(String::as_str);
        hashes.push(block_hash(namespace, kv_identity_hash, parent, block)?);
    }
    Ok(hashes)
}

/// Names the same tokens' block in the group of layers with this window.
///
/// # Errors
/// INVALID_ARGUMENT for what is no hash.
pub fn window_block_hash(block_hash: &str, window: u32) -> Result<String> {
    let block = raw_hash("block_hash", block_hash)?;
    Ok(hash_fields(&[WINDOW_TAG, block.as_bytes(), &window.to_le_bytes()]))
}

/// Names which computation KV belongs to.
///
/// # Errors
/// INVALID_ARGUMENT for a weights digest that is no hash.
pub fn kv_identity_hash(identity: &KvIdentity) -> Result<String> {
    let weights = raw_hash("weights_digest", &identity.weights_digest)?;
    let policy = identity.policy.clone().unwrap_or_default();
    let layers = numbers(
        identity
            .layers
            .iter()
            .flat_map(|layer| [layer.kind.cast_unsigned(), layer.window, layer.kv_heads, layer.key_dim, layer.value_dim]),
    );
    let rates = [policy.key_bits, policy.value_bits, policy.group_size];
    let kinds = [policy.scale_type.cast_unsigned(), policy.key_rotation.cast_unsigned()];
    let policy_field = numbers(rates.into_iter().chain(kinds));
    let exact = numbers(policy.exact_layers);
    let states = states_field(identity);
    let mut fields = vec![IDENTITY_TAG, weights.as_bytes().as_slice(), &layers, &policy_field, &exact];
    if states.len() > STATES_TAG.len() {
        fields.push(&states);
    }
    Ok(hash_fields(&fields))
}

fn states_field(identity: &KvIdentity) -> Vec<u8> {
    let mut field = STATES_TAG.to_vec();
    for (index, layer) in (0u32..).zip(&identity.layers) {
        if layer.state_tensors.is_empty() {
            continue;
        }
        field.extend(numbers([index, length(&layer.state_tensors)]));
        for tensor in &layer.state_tensors {
            field.extend(numbers([tensor.r#type.cast_unsigned(), length(&tensor.shape)]));
            field.extend(numbers(tensor.shape.iter().copied()));
        }
    }
    field
}

fn length<T>(list: &[T]) -> u32 {
    u32::try_from(list.len()).expect("a message has fewer than 2^32 entries")
}

fn raw_hash(field: &str, text: &str) -> Result<blake3::Hash> {
    let parsed = blake3::Hash::from_hex(text).ok().filter(|_| is_hash(text));
    parsed.ok_or_else(|| Error::invalid(field, "expected 64 lower-case hex digits"))
}

fn numbers(values: impl IntoIterator<Item = u32>) -> Vec<u8> {
    values.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Prefixes each field with its length, so that no two lists of fields give the same bytes.
fn hash_fields(fields: &[&[u8]]) -> String {
    let mut hasher = Hasher::default();
    for field in fields {
        hasher.write(&(field.len() as u64).to_le_bytes());
        hasher.write(field);
    }
    hasher.digest().hash
}

#[derive(Default)]
pub(crate) struct Hasher {
    blake3: blake3::Hasher,
    size_bytes: i64,
}

impl Hasher {
    pub(crate) fn write(&mut self, data: &[u8]) {
        self.blake3.update(data);
        self.size_bytes += data.len() as i64;
    }

    pub(crate) fn digest(&self) -> Digest {
        Digest { hash: self.blake3.finalize().to_hex().to_string(), size_bytes: self.size_bytes }
    }
}
