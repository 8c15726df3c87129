package kvasir

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"testing"
	"testing/iotest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	cachestorev1 "kvasir.org/client/gen/kvasir/cachestore/v1"
	commonv1 "kvasir.org/client/gen/kvasir/common/v1"
	inferencev1 "kvasir.org/client/gen/kvasir/inference/v1"
)

func TestAddressesThatAreRefused(t *testing.T) {
	for address, field := range map[string]string{
		"": "address", "nonsense": "address", "unix:relative": "address", "unix:/a%20b": "address", "1.2.3.4:99999": "address",
		"::1:5": "address", "[::1": "address", "/tmp/x:1": "address", "192.0.2.1:443": "tls", "example.org:443": "tls",
	} {
		client, err := Dial(address)
		if found := AsError(err); client != nil || found.Code != codes.InvalidArgument || found.Field != field {
			t.Errorf("%q: %v", address, err)
		}
	}
	for _, address := range []string{"unix:/tmp/x.sock", "127.0.0.1:50051", "[::1]:50051", "localhost:50051"} {
		if _, err := Dial(address); err != nil {
			t.Errorf("%q: %v", address, err)
		}
	}
	for _, token := range []string{"two words", ""} {
		client, err := Dial("unix:/tmp/x.sock", WithToken(token))
		if found := AsError(err); client != nil || found == nil || found.Code != codes.Unauthenticated {
			t.Errorf("%q: %v", token, err)
		}
	}
}

func TestASocketsPathMayHaveWhatEndsAURLsPath(t *testing.T) {
	path := filepath.Join(t.TempDir(), "one #2?.sock")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	reached := make(chan struct{})
	go func() {
		if conn, err := listener.Accept(); err == nil {
			close(reached)
			conn.Close()
		}
	}()
	client, err := Dial("unix:" + path)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	go client.GetAgent(ctx, "ada")
	select {
	case <-reached:
	case <-ctx.Done():
		t.Error("nobody dialled the socket")
	}
}

func TestErrorsHaveWhatTheServiceSaid(t *testing.T) {
	from, err := status.New(codes.Aborted, "moved").WithDetails(
		&errdetails.ErrorInfo{Domain: "kvasir", Reason: "HEAD_MOVED", Metadata: map[string]string{"head_version": "7", "field": "version"}},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(1500 * time.Millisecond)},
	)
	if err != nil {
		t.Fatal(err)
	}
	found := AsError(fmt.Errorf("wrapped: %w", from.Err()))
	if !HasReason(found, commonv1.ErrorReason_ERROR_REASON_HEAD_MOVED) || found.Field != "version" || len(found.Metadata) != 1 ||
		found.Metadata["head_version"] != "7" || *found.RetryAfter != 1500*time.Millisecond {
		t.Errorf("%#v", found)
	}
}

func TestErrorsOfOthersHaveNoReasonOfOurs(t *testing.T) {
	from, err := status.New(codes.NotFound, "?").WithDetails(&errdetails.ErrorInfo{Domain: "proxy.example", Reason: "AGENT_NOT_FOUND"})
	if err != nil {
		t.Fatal(err)
	}
	if found := AsError(from.Err()); found.Reason == commonv1.ErrorReason_ERROR_REASON_AGENT_NOT_FOUND {
		t.Errorf("%#v", found)
	}
}

func TestContextsErrorsAreTold(t *testing.T) {
	client, err := Dial("unix:/nowhere/at/all.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err = client.GetAgent(ctx, "ada"); !errors.Is(err, context.Canceled) || AsError(err).Code != codes.Canceled {
		t.Errorf("%v", err)
	}
}

func TestTurnsThatAreRefusedHere(t *testing.T) {
	client, err := Dial("unix:/nowhere/at/all.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for field, turn := range map[string]Turn{
		"input":           {},
		"response_format": {Prompt: "a", Regex: "b", JSONSchema: "{}"},
	} {
		if _, err := client.Reply(context.Background(), turn); AsError(err) == nil || AsError(err).Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func TestAClosedClientsCallsAreCancelled(t *testing.T) {
	client, err := Dial("unix:/nowhere/at/all.sock")
	if err != nil || client.Close() != nil {
		t.Fatal(err)
	}
	_, calling := client.GetAgent(context.Background(), "ada")
	for _, err := range []error{calling, client.Close()} {
		var found *Error
		if !errors.As(err, &found) || found.Code != codes.Canceled {
			t.Errorf("%v", err)
		}
	}
}

// standIn is a store of one archive, and an engine whose agents are another's and that does not answer for its name.
type standIn struct {
	cachestorev1.UnimplementedAgentServiceServer
	inferencev1.UnimplementedInferenceServiceServer
	received int
}

func (s *standIn) ExportAgent(_ *cachestorev1.ExportAgentRequest, stream grpc.ServerStreamingServer[cachestorev1.ExportAgentResponse]) error {
	return stream.Send(&cachestorev1.ExportAgentResponse{Data: []byte("archive")})
}

func (s *standIn) ImportAgent(stream grpc.ClientStreamingServer[cachestorev1.ImportAgentRequest, cachestorev1.ImportAgentResponse]) error {
	for {
		piece, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&cachestorev1.ImportAgentResponse{Snapshot: &cachestorev1.SnapshotVersion{Version: 1}})
		}
		if err != nil {
			return err
		}
		s.received += len(piece.GetData())
	}
}

func (s *standIn) Generate(*inferencev1.GenerateRequest, grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
	metadata := map[string]string{"owner": "another"}
	held, err := status.New(codes.Unavailable, "held").WithDetails(
		&errdetails.ErrorInfo{Domain: "kvasir", Reason: "AGENT_HELD_ELSEWHERE", Metadata: metadata})
	return errors.Join(err, held.Err())
}

func (s *standIn) GetCapabilities(ctx context.Context, _ *inferencev1.GetCapabilitiesRequest) (*inferencev1.GetCapabilitiesResponse, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func served(t *testing.T, service *standIn, options ...Option) *Client {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	cachestorev1.RegisterAgentServiceServer(server, service)
	inferencev1.RegisterInferenceServiceServer(server, service)
	go server.Serve(listener)
	client, err := Dial(listener.Addr().String(), options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		client.Close()
		server.Stop()
	})
	return client
}

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, io.ErrShortWrite }

func TestAnArchiveThatCannotBeReadOrWrittenIsAnErrorOfTheClient(t *testing.T) {
	service := &standIn{}
	client, ctx := served(t, service), context.Background()
	// As of a download that was cut: what came of it is no archive.
	torn := io.MultiReader(bytes.NewReader(make([]byte, 3<<19)), iotest.ErrReader(io.ErrUnexpectedEOF))
	_, readError := client.ImportAgent(ctx, "ada", torn, false)
	_, writeError := client.ExportAgent(ctx, "ada", At{}, fullDisk{})
	for cause, err := range map[error]error{io.ErrUnexpectedEOF: readError, io.ErrShortWrite: writeError} {
		var found *Error
		if !errors.As(err, &found) || !errors.Is(err, cause) || found.Code != codes.Unknown || found.Field != "archive" {
			t.Errorf("%v: %#v", cause, err)
		}
	}
	for _, size := range []int{0, 1, pieceBytes, 2*pieceBytes + 1} {
		service.received = 0
		archive := iotest.DataErrReader(iotest.HalfReader(bytes.NewReader(make([]byte, size))))
		if version, err := client.ImportAgent(ctx, "ada", archive, false); err != nil || version.GetVersion() != 1 || service.received != size {
			t.Errorf("%d: %v %v %d", size, version, err, service.received)
		}
	}
}

func TestAnEngineThatDoesNotAnswerForItsNameIsNotWaitedForAsLongAsATurn(t *testing.T) {
	asked, silent := served(t, &standIn{}), served(t, &standIn{}, WithTimeout(100*time.Millisecond))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := asked.WithEngines(silent).Reply(ctx, Turn{Agent: "ada", Prompt: "Hello"})
	if !HasReason(err, commonv1.ErrorReason_ERROR_REASON_AGENT_HELD_ELSEWHERE) || ctx.Err() != nil {
		t.Errorf("%v", err)
	}
}
