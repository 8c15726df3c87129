package kvasir

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	cachestorev1 "kvasir.org/client/gen/kvasir/cachestore/v1"
)

type namedDigest struct {
	Hash      string `json:"hash"`
	SizeBytes int64  `json:"size_bytes"`
}

// load reads a file of the golden cases for all languages.
func load[T any](t *testing.T, name string) T {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("proto", "vectors", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	var found T
	if err := json.Unmarshal(text, &found); err != nil {
		t.Fatal(err)
	}
	return found
}

func decoded(t *testing.T, text string) []byte {
	t.Helper()
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func digestOf(t *testing.T, data []byte) namedDigest {
	t.Helper()
	found, err := DigestOf(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	return namedDigest(found)
}

// expect fails for a hash that is not the one expected.
func expect(t *testing.T, wanted string) func(found string, err error) {
	return func(found string, err error) {
		t.Helper()
		if err != nil || found != wanted {
			t.Errorf("expected %s, found %s %v", wanted, found, err)
		}
	}
}

func tokens(count, first int) []uint32 {
	made := make([]uint32, count)
	for i := range made {
		made[i] = uint32((first + 7919*i) % (1 << 31))
	}
	return made
}

func TestDigests(t *testing.T) {
	vectors := load[struct {
		Cases []struct {
			PatternBytes int    `json:"pattern_bytes"`
			Hash         string `json:"hash"`
			SizeBytes    int64  `json:"size_bytes"`
		} `json:"cases"`
		NotDigests  []string `json:"not_digests"`
		TokenHashes []struct {
			Token  string `json:"token"`
			Blake3 string `json:"blake3"`
		} `json:"token_hashes"`
	}](t, "digests")
	for _, each := range vectors.Cases {
		pattern := make([]byte, each.PatternBytes)
		for i := range pattern {
			pattern[i] = byte(i % 251)
		}
		if found := digestOf(t, pattern); found != (namedDigest{each.Hash, each.SizeBytes}) {
			t.Errorf("%d bytes: %v", each.PatternBytes, found)
		}
	}
	for _, text := range vectors.NotDigests {
		if IsHash(text) {
			t.Errorf("%q passed as a hash", text)
		}
	}
	for _, each := range vectors.TokenHashes {
		expect(t, each.Blake3)(digestOf(t, []byte(each.Token)).Hash, nil)
	}
}

func TestBlockHashes(t *testing.T) {
	vectors := load[struct {
		Cases []struct {
			Namespace      string   `json:"namespace"`
			KVIdentityHash string   `json:"kv_identity_hash"`
			FirstToken     int      `json:"first_token"`
			TokenCount     int      `json:"token_count"`
			BlockHashes    []string `json:"block_hashes"`
		} `json:"cases"`
		Twins struct {
			TokenIDs []uint32 `json:"token_ids"`
			Cases    []struct {
				Namespace string `json:"namespace"`
				Hash      string `json:"hash"`
			} `json:"cases"`
		} `json:"twins"`
		LargestToken struct {
			TokenIDs []uint32 `json:"token_ids"`
			Hash     string   `json:"hash"`
		} `json:"largest_token"`
	}](t, "block_hashes")
	for _, each := range vectors.Cases {
		found, err := BlockHashes(each.Namespace, each.KVIdentityHash, tokens(each.TokenCount, each.FirstToken))
		if err != nil || !slices.Equal(found, each.BlockHashes) {
			t.Errorf("%q: %v %v", each.Namespace, found, err)
		}
	}
	identity := vectors.Cases[0].KVIdentityHash
	for _, each := range vectors.Twins.Cases {
		expect(t, each.Hash)(BlockHash(each.Namespace, identity, "", []uint32{1}))
	}
	expect(t, vectors.LargestToken.Hash)(BlockHash("", identity, "", vectors.LargestToken.TokenIDs))
	if _, err := BlockHash("", "AB", "", nil); err == nil {
		t.Error("a KV identity hash that is none passed")
	}
}

func TestChainHashes(t *testing.T) {
	vectors := load[struct {
		KVIdentityHash string   `json:"kv_identity_hash"`
		FirstToken     int      `json:"first_token"`
		BlockChain     []string `json:"block_chain"`
		TailOf600      string   `json:"tail_of_600_tokens"`
		TailOf5        string   `json:"tail_of_5_tokens"`
	}](t, "chain_hashes")
	all := tokens(600, vectors.FirstToken)
	chain, err := BlockHashes("", vectors.KVIdentityHash, all)
	if err != nil || !slices.Equal(chain, vectors.BlockChain) {
		t.Fatalf("%v %v", chain, err)
	}
	expect(t, vectors.TailOf600)(BlockHash("", vectors.KVIdentityHash, chain[1], all[512:]))
	expect(t, vectors.TailOf5)(BlockHash("", vectors.KVIdentityHash, "", all[:5]))
}

func TestWindowBlocks(t *testing.T) {
	vectors := load[struct {
		BlockHashes []struct {
			BlockHash       string `json:"block_hash"`
			Window          uint32 `json:"window"`
			WindowBlockHash string `json:"window_block_hash"`
		} `json:"block_hashes"`
		KVIdentityHash string `json:"kv_identity_hash"`
		ManifestBase64 string `json:"manifest_base64"`
	}](t, "window_blocks")
	for _, each := range vectors.BlockHashes {
		expect(t, each.WindowBlockHash)(WindowBlockHash(each.BlockHash, each.Window))
	}
	manifest := &cachestorev1.Manifest{}
	if err := proto.Unmarshal(decoded(t, vectors.ManifestBase64), manifest); err != nil {
		t.Fatal(err)
	}
	expect(t, vectors.KVIdentityHash)(KVIdentityHash(manifest.GetKvIdentity()))
}

func TestKVIdentities(t *testing.T) {
	vectors := load[struct {
		Cases []struct {
			KVIdentity       json.RawMessage `json:"kv_identity"`
			SerializedBase64 string          `json:"serialized_base64"`
			KVIdentityHash   string          `json:"kv_identity_hash"`
		} `json:"cases"`
	}](t, "kv_identities")
	for _, each := range vectors.Cases {
		written, parsed := &cachestorev1.KvIdentity{}, &cachestorev1.KvIdentity{}
		if err := protojson.Unmarshal(each.KVIdentity, written); err != nil {
			t.Fatal(err)
		}
		if err := proto.Unmarshal(decoded(t, each.SerializedBase64), parsed); err != nil || !proto.Equal(written, parsed) {
			t.Errorf("%v is not %v: %v", parsed, written, err)
		}
		expect(t, each.KVIdentityHash)(KVIdentityHash(written))
	}
}

func TestFrames(t *testing.T) {
	vectors := load[struct {
		Serialized struct {
			PatternBytes int    `json:"pattern_bytes"`
			Base64       string `json:"base64"`
		} `json:"serialized"`
	}](t, "frames")
	frame := &cachestorev1.BlobFrame{}
	if err := proto.Unmarshal(decoded(t, vectors.Serialized.Base64), frame); err != nil {
		t.Fatal(err)
	}
	named := namedDigest{frame.GetDigest().GetHash(), frame.GetDigest().GetSizeBytes()}
	if len(frame.GetData()) != vectors.Serialized.PatternBytes || digestOf(t, frame.GetData()) != named {
		t.Errorf("%v", frame)
	}
}

func TestManifestAndArchive(t *testing.T) {
	type file struct {
		Base64         string      `json:"base64"`
		Digest         namedDigest `json:"digest"`
		TokenCount     int         `json:"token_count"`
		TextCodePoints int         `json:"text_code_points"`
	}
	for _, name := range []string{"manifest", "archive"} {
		vectors := load[file](t, name)
		if found := digestOf(t, decoded(t, vectors.Base64)); found != vectors.Digest {
			t.Errorf("%s: %v", name, found)
		}
	}
	vectors, manifest := load[file](t, "manifest"), &cachestorev1.Manifest{}
	if err := proto.Unmarshal(decoded(t, vectors.Base64), manifest); err != nil {
		t.Fatal(err)
	}
	if len(manifest.GetTokenIds()) != vectors.TokenCount || utf8.RuneCountInString(manifest.GetText()) != vectors.TextCodePoints {
		t.Errorf("%d tokens, %d code points", len(manifest.GetTokenIds()), utf8.RuneCountInString(manifest.GetText()))
	}
}
