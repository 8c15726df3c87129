// Digests and block hashes, byte for byte as proto/README.md has them.
package org.kvasir.client;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.List;
import org.bouncycastle.crypto.digests.Blake3Digest;
import org.kvasir.cachestore.v1.Digest;
import org.kvasir.cachestore.v1.KvIdentity;

/** The hashes of the contract, as 64 lower-case hex digits. Token ids are unsigned. */
public final class Hashes {
  /** Tokens of a full block. */
  public static final int BLOCK_TOKENS = 256;

  private Hashes() {}

  /** The digest of all bytes of a stream: their hash and their number. */
  public static Digest digestOf(InputStream data) throws IOException {
    Hasher hasher = new Hasher();
    byte[] buffer = new byte[1 << 16];
    for (int count; (count = data.read(buffer)) >= 0; ) {
      hasher.write(buffer, count);
    }
    return hasher.digest();
  }

  /** True for exactly 64 lower-case hex digits. */
  public static boolean isHash(String text) {
    return text.length() == 64 && text.chars().allMatch(each -> each >= '0' && each <= '9' || each >= 'a' && each <= 'f');
  }

  /** Names a block: of a namespace, a KV identity, the block hash of the block before ("" for the first) and the tokens. */
  public static String blockHash(String namespace, String kvIdentityHash, String parent, int... tokenIds) {
    byte[] before = parent.isEmpty() ? new byte[0] : raw("parent", parent);
    byte[] space = namespace.getBytes(StandardCharsets.UTF_8);
    return fields(ascii("kvasir.block.v1"), space, raw("kv_identity_hash", kvIdentityHash), before, numbers(tokenIds));
  }

  /**
   * Names the full blocks of tokens, first block first; tokens behind the last full block have no hash. With an empty namespace
   * they are the chain hashes of tensor files.
   */
  public static List<String> blockHashes(String namespace, String kvIdentityHash, int... tokenIds) {
    List<String> hashes = new ArrayList<>();
    String parent = "";
    for (int start = 0; start + BLOCK_TOKENS <= tokenIds.length; start += BLOCK_TOKENS) {
      parent = blockHash(namespace, kvIdentityHash, parent, Arrays.copyOfRange(tokenIds, start, start + BLOCK_TOKENS));
      hashes.add(parent);
    }
    return hashes;
  }

  /** Names the same tokens' block in the group of layers with this (unsigned) window. */
  public static String windowBlockHash(String blockHash, int window) {
    return fields(ascii("kvasir.window_block.v1"), raw("block_hash", blockHash), numbers(window));
  }

  /** Names which computation KV belongs to. */
  public static String kvIdentityHash(KvIdentity identity) {
    Numbers layers = new Numbers();
    Numbers states = new Numbers();
    for (int index = 0; index < identity.getLayersCount(); index++) {
      var layer = identity.getLayers(index);
      layers.add(layer.getKindValue(), layer.getWindow(), layer.getKvHeads(), layer.getKeyDim(), layer.getValueDim());
      if (layer.getStateTensorsCount() > 0) {
        states.add(index, layer.getStateTensorsCount());
      }
      for (var tensor : layer.getStateTensorsList()) {
        states.add(tensor.getTypeValue(), tensor.getShapeCount());
        tensor.getShapeList().forEach(states::add);
      }
    }
    var policy = identity.getPolicy();
    Numbers exact = new Numbers();
    policy.getExactLayersList().forEach(exact::add);
    List<byte[]> all = new ArrayList<>();
    all.add(ascii("kvasir.kv_identity.v1"));
    all.add(raw("weights_digest", identity.getWeightsDigest()));
    all.add(layers.bytes());
    all.add(
        numbers(
            policy.getKeyBits(), policy.getValueBits(), policy.getGroupSize(), policy.getScaleTypeValue(), policy.getKeyRotationValue()));
    all.add(exact.bytes());
    if (states.bytes().length > 0) {
      ByteArrayOutputStream field = new ByteArrayOutputStream();
      field.writeBytes(ascii("states"));
      field.writeBytes(states.bytes());
      all.add(field.toByteArray());
    }
    return fields(all.toArray(byte[][]::new));
  }

  private static byte[] ascii(String text) {
    return text.getBytes(StandardCharsets.US_ASCII);
  }

  private static byte[] raw(String field, String hash) {
    if (!isHash(hash)) {
      throw KvasirException.invalid(field, "expected 64 lower-case hex digits");
    }
    return HexFormat.of().parseHex(hash);
  }

  private static byte[] numbers(int... values) {
    Numbers made = new Numbers();
    made.add(values);
    return made.bytes();
  }

  /** Prefixes each field with its length, so that no two lists of fields give the same bytes. */
  private static String fields(byte[]... fields) {
    Hasher hasher = new Hasher();
    for (byte[] field : fields) {
      hasher.write(ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN).putLong(field.length).array(), 8);
      hasher.write(field, field.length);
    }
    return hasher.digest().getHash();
  }

  /** 4 bytes little-endian each. */
  private static final class Numbers {
    private final ByteArrayOutputStream bytes = new ByteArrayOutputStream();

    void add(int... values) {
      for (int value : values) {
        bytes.writeBytes(ByteBuffer.allocate(4).order(ByteOrder.LITTLE_ENDIAN).putInt(value).array());
      }
    }

    byte[] bytes() {
      return bytes.toByteArray();
    }
  }

  /** Counts and hashes what is written. */
  static final class Hasher {
    private final Blake3Digest blake3 = new Blake3Digest(256);
    private long sizeBytes;

    void write(byte[] data, int count) {
      blake3.update(data, 0, count);
      sizeBytes += count;
    }

    Digest digest() {
      byte[] hash = new byte[32];
      blake3.doFinal(hash, 0);
      return Digest.newBuilder().setHash(HexFormat.of().formatHex(hash)).setSizeBytes(sizeBytes).build();
    }
  }
}
