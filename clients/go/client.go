// Package kvasir is the Go client of Kvasir: agents' conversations with an engine, and their memories by name.
//
// One client speaks to one engine (unix:/path or host:port), which also answers for the agents of its store; a store's own
// address answers for agents too. Every error of a method is an [*Error]. A client may be used by many goroutines.
//
// Requests that only read are asked again when the service is UNAVAILABLE, four times in all, because repeating them changes
// nothing. A turn is not asked again by itself: give it a RequestID, and asking again with it and the same input does nothing twice.
package kvasir

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	cachestorev1 "kvasir.org/client/gen/kvasir/cachestore/v1"
	inferencev1 "kvasir.org/client/gen/kvasir/inference/v1"
)

// Version of this client.
const Version = "0.1.0"

const defaultTimeout = 10 * time.Second

// serviceConfig lets gRPC repeat what the .proto says may be repeated, while the service is UNAVAILABLE.
var serviceConfig = sync.OnceValue(func() string {
	var names []string
	for _, file := range []protoreflect.FileDescriptor{
		cachestorev1.File_kvasir_cachestore_v1_cachestore_proto, inferencev1.File_kvasir_inference_v1_inference_proto,
	} {
		for s := range file.Services().Len() {
			service := file.Services().Get(s)
			for m := range service.Methods().Len() {
				method := service.Methods().Get(m)
				if method.Options().(*descriptorpb.MethodOptions).GetIdempotencyLevel() != descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN {
					names = append(names, fmt.Sprintf(`{"service": %q, "method": %q}`, service.FullName(), method.Name()))
				}
			}
		}
	}
	return fmt.Sprintf(`{"methodConfig": [{"name": [%s], "retryPolicy": {"maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "1s",
		"backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`, strings.Join(names, ", "))
})

// Client is a connection to an engine, or to a store.
type Client struct {
	conn    *grpc.ClientConn
	engine  inferencev1.InferenceServiceClient
	agents  cachestorev1.AgentServiceClient
	timeout time.Duration
	// Of the engines of the store; see WithEngines.
	others     []*Client
	leaseOwner *atomic.Value
}

type settings struct {
	token   *string
	tls     *tls.Config
	timeout time.Duration
}

// Option changes how a client connects.
type Option func(*settings)

// WithToken shows the token of a credential with every call. On a Unix socket its owner needs none. An empty token is refused: a
// call without one is the owner's there.
func WithToken(token string) Option { return func(s *settings) { s.token = &token } }

// WithTLS encrypts the connection; beyond this machine it must be given. RootCAs may be the server's own certificate, which pins
// it; Certificates are the client's own, for a server that asks.
func WithTLS(config *tls.Config) Option { return func(s *settings) { s.tls = config } }

// WithTimeout sets the deadline of round trips whose context has none; 10 seconds if it is not given. Turns, warms and transfers
// may last for minutes: only their context ends them.
func WithTimeout(timeout time.Duration) Option { return func(s *settings) { s.timeout = timeout } }

// Dial makes a client of the service at unix:/path, host:port or [v6 address]:port. It connects with the first call.
func Dial(address string, options ...Option) (*Client, error) {
	given := settings{timeout: defaultTimeout}
	for _, option := range options {
		option(&given)
	}
	isLoopback, err := parseAddress(address)
	if err != nil {
		return nil, err
	}
	if given.tls == nil && !isLoopback {
		return nil, invalid("tls", "%s is another machine, so TLS is needed", address)
	}
	transport := insecure.NewCredentials()
	if given.tls != nil {
		transport = credentials.NewTLS(given.tls)
	}
	dialing := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultServiceConfig(serviceConfig()),
		grpc.WithNoProxy(),
		// A service that froze or a machine that vanished ends the call as UNAVAILABLE after 20 s.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 10 * time.Second}),
		// Finds a restarted service soon; gRPC's own pauses grow to two minutes.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, MaxDelay: 2 * time.Second},
			MinConnectTimeout: 2 * time.Second,
		}),
	}
	if given.token != nil {
		if !isToken(*given.token) {
			return nil, refused(codes.Unauthenticated, "token", "expected printable ASCII without spaces")
		}
		dialing = append(dialing, grpc.WithPerRPCCredentials(bearer(*given.token)))
	}
	target := address
	if path, isSocket := strings.CutPrefix(address, "unix:"); isSocket {
		target = "unix:" + (&url.URL{Path: path}).EscapedPath() // gRPC reads a URL: # and ? would end the path
	}
	conn, err := grpc.NewClient(target, dialing...)
	if err != nil {
		return nil, invalid("address", "%v", err)
	}
	return &Client{
		conn:       conn,
		engine:     inferencev1.NewInferenceServiceClient(conn),
		agents:     cachestorev1.NewAgentServiceClient(conn),
		timeout:    given.timeout,
		leaseOwner: &atomic.Value{},
	}, nil
}

// WithEngines is this client, on the same connection, that knows the other engines of its engine's store. A turn whose agent one of
// them holds is made there. Addresses come from the caller alone, never from an engine.
func (c *Client) WithEngines(others ...*Client) *Client {
	knowing := *c
	knowing.others = slices.Clone(others)
	return &knowing
}

// Close ends the connection and what is under way on it.
func (c *Client) Close() error { return typed(c.conn.Close()) }

// Engine is the generated client of the inference service, for calls that have no method here: models, statistics. Its errors
// become an *Error by [AsError].
func (c *Client) Engine() inferencev1.InferenceServiceClient { return c.engine }

// Agents is the generated client of the agents' service.
func (c *Client) Agents() cachestorev1.AgentServiceClient { return c.agents }

// withDeadline gives a round trip the client's deadline, where its context has none.
func (c *Client) withDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, c.timeout)
}

type bearer string

func (token bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(token)}, nil
}

// RequireTransportSecurity is false: Dial has seen to it that what is not loopback has TLS.
func (bearer) RequireTransportSecurity() bool { return false }

func isToken(text string) bool {
	for _, char := range []byte(text) {
		if char <= ' ' || char > '~' {
			return false
		}
	}
	return text != ""
}
