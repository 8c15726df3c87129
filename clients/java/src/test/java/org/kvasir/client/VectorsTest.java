// The golden cases of proto/vectors, which the clients of all languages pass.
package org.kvasir.client;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertFalse;
import static org.junit.Assert.assertThrows;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.util.JsonFormat;
import java.io.ByteArrayInputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Base64;
import java.util.List;
import java.util.stream.IntStream;
import java.util.stream.StreamSupport;
import org.junit.Test;
import org.kvasir.cachestore.v1.BlobFrame;
import org.kvasir.cachestore.v1.Digest;
import org.kvasir.cachestore.v1.KvIdentity;
import org.kvasir.cachestore.v1.Manifest;

public class VectorsTest {
  @Test
  public void digests() throws Exception {
    JsonObject vectors = load("digests");
    for (JsonElement each : vectors.getAsJsonArray("cases")) {
      assertEquals(digest(each), digestOf(pattern(number(each, "pattern_bytes"))));
    }
    for (String not : texts(vectors.getAsJsonArray("not_digests"))) {
      assertFalse(not, Hashes.isHash(not));
    }
    for (JsonElement each : vectors.getAsJsonArray("token_hashes")) {
      assertEquals(text(each, "blake3"), digestOf(text(each, "token").getBytes(StandardCharsets.UTF_8)).getHash());
    }
  }

  @Test
  public void hashesOfBlocks() throws Exception {
    JsonObject vectors = load("block_hashes");
    for (JsonElement each : vectors.getAsJsonArray("cases")) {
      int[] tokens = tokens(number(each, "token_count"), number(each, "first_token"));
      List<String> expected = texts(each.getAsJsonObject().getAsJsonArray("block_hashes"));
      assertEquals(expected, Hashes.blockHashes(text(each, "namespace"), text(each, "kv_identity_hash"), tokens));
    }
    String identity = text(vectors.getAsJsonArray("cases").get(0), "kv_identity_hash");
    for (JsonElement each : vectors.getAsJsonObject("twins").getAsJsonArray("cases")) {
      assertEquals(text(each, "hash"), Hashes.blockHash(text(each, "namespace"), identity, "", 1));
    }
    JsonObject largest = vectors.getAsJsonObject("largest_token");
    int[] ids = StreamSupport.stream(largest.getAsJsonArray("token_ids").spliterator(), false).mapToInt(id -> (int) id.getAsLong()).toArray();
    assertEquals(text(largest, "hash"), Hashes.blockHash("", identity, "", ids));
    assertThrows(KvasirException.class, () -> Hashes.blockHash("", "AB", ""));
  }

  @Test
  public void hashesOfChains() throws Exception {
    JsonObject vectors = load("chain_hashes");
    String identity = text(vectors, "kv_identity_hash");
    int[] tokens = tokens(600, number(vectors, "first_token"));
    List<String> chain = Hashes.blockHashes("", identity, tokens);
    assertEquals(texts(vectors.getAsJsonArray("block_chain")), chain);
    int[] tail = java.util.Arrays.copyOfRange(tokens, 512, 600);
    assertEquals(text(vectors, "tail_of_600_tokens"), Hashes.blockHash("", identity, chain.get(1), tail));
    assertEquals(text(vectors, "tail_of_5_tokens"), Hashes.blockHash("", identity, "", java.util.Arrays.copyOf(tokens, 5)));
  }

  @Test
  public void blocksOfWindows() throws Exception {
    JsonObject vectors = load("window_blocks");
    for (JsonElement each : vectors.getAsJsonArray("block_hashes")) {
      int window = (int) each.getAsJsonObject().get("window").getAsLong();
      assertEquals(text(each, "window_block_hash"), Hashes.windowBlockHash(text(each, "block_hash"), window));
    }
    Manifest manifest = Manifest.parseFrom(bytes(vectors, "manifest_base64"));
    assertEquals(text(vectors, "kv_identity_hash"), Hashes.kvIdentityHash(manifest.getKvIdentity()));
  }

  @Test
  public void hashesOfKvIdentities() throws Exception {
    for (JsonElement each : load("kv_identities").getAsJsonArray("cases")) {
      KvIdentity.Builder written = KvIdentity.newBuilder();
      JsonFormat.parser().merge(each.getAsJsonObject().get("kv_identity").toString(), written);
      assertEquals(written.build(), KvIdentity.parseFrom(bytes(each, "serialized_base64")));
      assertEquals(text(each, "kv_identity_hash"), Hashes.kvIdentityHash(written.build()));
    }
  }

  @Test
  public void framesManifestAndArchive() throws Exception {
    BlobFrame frame = BlobFrame.parseFrom(bytes(load("frames").get("serialized"), "base64"));
    assertEquals(frame.getDigest(), digestOf(frame.getData().toByteArray()));
    for (String name : List.of("manifest", "archive")) {
      JsonObject vectors = load(name);
      assertEquals(digest(vectors.get("digest")), digestOf(bytes(vectors, "base64")));
    }
    JsonObject vectors = load("manifest");
    Manifest manifest = Manifest.parseFrom(bytes(vectors, "base64"));
    assertEquals(number(vectors, "token_count"), manifest.getTokenIdsCount());
    assertEquals(number(vectors, "text_code_points"), manifest.getText().codePointCount(0, manifest.getText().length()));
  }

  @Test
  public void addressesThatAreRefused() {
    for (String address : List.of("", "nonsense", "unix:relative", "unix:/a%20b", "1.2.3.4:99999", "::1:5", "[::1", "/tmp/x:1")) {
      assertEquals(address, "address", assertThrows(KvasirException.class, () -> Client.connect(address)).field());
    }
    for (String address : List.of("192.0.2.1:443", "example.org:443")) {
      assertEquals("tls", assertThrows(KvasirException.class, () -> Client.connect(address)).field());
    }
    for (String address : List.of("unix:/tmp/x.sock", "127.0.0.1:50051", "[::1]:50051", "localhost:50051")) {
      Client.connect(address).close();
    }
  }

  private static JsonObject load(String name) throws Exception {
    return JsonParser.parseString(Files.readString(Path.of("proto", "vectors", name + ".json"))).getAsJsonObject();
  }

  private static String text(JsonElement from, String key) {
    return from.getAsJsonObject().get(key).getAsString();
  }

  private static int number(JsonElement from, String key) {
    return from.getAsJsonObject().get(key).getAsInt();
  }

  private static List<String> texts(JsonArray array) {
    return StreamSupport.stream(array.spliterator(), false).map(JsonElement::getAsString).toList();
  }

  private static byte[] bytes(JsonElement from, String key) {
    return Base64.getDecoder().decode(text(from, key));
  }

  private static Digest digest(JsonElement from) {
    return Digest.newBuilder().setHash(text(from, "hash")).setSizeBytes(number(from, "size_bytes")).build();
  }

  private static Digest digestOf(byte[] data) throws Exception {
    return Hashes.digestOf(new ByteArrayInputStream(data));
  }

  private static byte[] pattern(int bytes) {
    byte[] made = new byte[bytes];
    for (int index = 0; index < bytes; index++) {
      made[index] = (byte) (index % 251);
    }
    return made;
  }

  private static int[] tokens(int count, int first) {
    return IntStream.range(0, count).map(index -> (int) ((first + 7919L * index) % (1L << 31))).toArray();
  }
}
