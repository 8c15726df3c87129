package kvasir

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	commonv1 "kvasir.org/client/gen/kvasir/common/v1"
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
