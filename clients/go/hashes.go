package kvasir

import (
	"encoding/binary"
	"encoding/hex"
	"hash"
	"io"

	"lukechampine.com/blake3"

	cachestorev1 "kvasir.org/client/gen/kvasir/cachestore/v1"
)

// BlockTokens is the number of tokens of a full block.
const BlockTokens = 256

const (
	blockTag    = "kvasir.block.v1"
	windowTag   = "kvasir.window_block.v1"
	identityTag = "kvasir.kv_identity.v1"
	statesTag   = "states"
)

// Digest names bytes: their BLAKE3-256 as 64 lower-case hex digits, and their number.
type Digest struct {
	Hash      string
	SizeBytes int64
}

// DigestOf is the digest of all bytes of a reader.
func DigestOf(data io.Reader) (Digest, error) {
	hasher := newHasher()
	buffer := make([]byte, pieceBytes)
	for {
		count, err := data.Read(buffer)
		hasher.write(buffer[:count])
		if err == io.EOF {
			return hasher.digest(), nil
		}
		if err != nil {
			return Digest{}, err
		}
	}
}

// IsHash is true for exactly 64 lower-case hex digits.
func IsHash(text string) bool {
	if len(text) != 64 {
		return false
	}
	for _, char := range []byte(text) {
		if (char < '0' || char > '9') && (char < 'a' || char > 'f') {
			return false
		}
	}
	return true
}

// BlockHash names a block: of a namespace, a KV identity, the block hash of the block before ("" for the first) and the tokens.
func BlockHash(namespace, kvIdentityHash, parent string, tokenIDs []uint32) (string, error) {
	identity, err := rawHash("kv_identity_hash", kvIdentityHash)
	if err != nil {
		return "", err
	}
	var before []byte
	if parent != "" {
		if before, err = rawHash("parent", parent); err != nil {
			return "", err
		}
	}
	return hashFields([]byte(blockTag), []byte(namespace), identity, before, numbers(nil, tokenIDs...)), nil
}

// BlockHashes names the full blocks of tokens, first block first; tokens behind the last full block have no hash. With an empty
// namespace they are the chain hashes of tensor files.
func BlockHashes(namespace, kvIdentityHash string, tokenIDs []uint32) ([]string, error) {
	var hashes []string
	parent := ""
	for start := 0; start+BlockTokens <= len(tokenIDs); start += BlockTokens {
		found, err := BlockHash(namespace, kvIdentityHash, parent, tokenIDs[start:start+BlockTokens])
		if err != nil {
			return nil, err
		}
		hashes, parent = append(hashes, found), found
	}
	return hashes, nil
}

// WindowBlockHash names the same tokens' block in the group of layers with this window.
func WindowBlockHash(blockHash string, window uint32) (string, error) {
	block, err := rawHash("block_hash", blockHash)
	if err != nil {
		return "", err
	}
	return hashFields([]byte(windowTag), block, numbers(nil, window)), nil
}

// KVIdentityHash names which computation KV belongs to.
func KVIdentityHash(identity *cachestorev1.KvIdentity) (string, error) {
	weights, err := rawHash("weights_digest", identity.GetWeightsDigest())
	if err != nil {
		return "", err
	}
	var layers, states []byte
	for index, layer := range identity.GetLayers() {
		layers = numbers(layers, uint32(layer.GetKind()), layer.GetWindow(), layer.GetKvHeads(), layer.GetKeyDim(), layer.GetValueDim())
		if tensors := layer.GetStateTensors(); len(tensors) > 0 {
			states = numbers(states, uint32(index), uint32(len(tensors)))
			for _, tensor := range tensors {
				states = numbers(states, uint32(tensor.GetType()), uint32(len(tensor.GetShape())))
				states = numbers(states, tensor.GetShape()...)
			}
		}
	}
	policy := identity.GetPolicy()
	fields := [][]byte{
		[]byte(identityTag), weights, layers,
		numbers(nil, policy.GetKeyBits(), policy.GetValueBits(), policy.GetGroupSize(), uint32(policy.GetScaleType()), uint32(policy.GetKeyRotation())),
		numbers(nil, policy.GetExactLayers()...),
	}
	if states != nil {
		fields = append(fields, append([]byte(statesTag), states...))
	}
	return hashFields(fields...), nil
}

func rawHash(field, text string) ([]byte, error) {
	if !IsHash(text) {
		return nil, invalid(field, "expected 64 lower-case hex digits")
	}
	return hex.DecodeString(text)
}

func numbers(to []byte, values ...uint32) []byte {
	for _, value := range values {
		to = binary.LittleEndian.AppendUint32(to, value)
	}
	return to
}

// hashFields prefixes each field with its length, so that no two lists of fields give the same bytes.
func hashFields(fields ...[]byte) string {
	hasher := newHasher()
	for _, field := range fields {
		hasher.write(binary.LittleEndian.AppendUint64(nil, uint64(len(field))))
		hasher.write(field)
	}
	return hasher.digest().Hash
}

type hasher struct {
	blake3    hash.Hash
	sizeBytes int64
}

func newHasher() *hasher { return &hasher{blake3: blake3.New(32, nil)} }

func (h *hasher) write(data []byte) {
	h.blake3.Write(data) // never fails
	h.sizeBytes += int64(len(data))
}

func (h *hasher) digest() Digest {
	return Digest{Hash: hex.EncodeToString(h.blake3.Sum(nil)), SizeBytes: h.sizeBytes}
}
