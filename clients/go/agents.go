package kvasir

import (
	"context"
	"errors"
	"io"
	"iter"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	cachestorev1 "kvasir.org/client/gen/kvasir/cachestore/v1"
)

// A message of an archive; gRPC's usual limit is 4 MiB.
const pieceBytes = 1 << 20

// At names a version of an agent. Zero: the newest, of the line that was used last.
type At struct {
	Version int64
	// KVIdentityHash names a line, where the agent has several: one for each model and KV policy.
	KVIdentityHash string
}

func (a At) version() *int64 {
	if a.Version == 0 {
		return nil
	}
	return &a.Version
}

// Agents to list. Zero: all of the namespace.
type Agents struct {
	NamePrefix string
	// Labels must all match.
	Labels map[string]string
	// PageSize is how many are asked for at once; 0: the service's own.
	PageSize int32
}

// ListAgents gives agents by name, page after page. The last pair may have an error.
func (c *Client) ListAgents(ctx context.Context, which Agents) iter.Seq2[*cachestorev1.Agent, error] {
	return pages(func(token string) ([]*cachestorev1.Agent, string, error) {
		ctx, cancel := c.withDeadline(ctx)
		defer cancel()
		page, err := c.agents.ListAgents(ctx, &cachestorev1.ListAgentsRequest{
			NamePrefix: which.NamePrefix, Labels: which.Labels, PageSize: which.PageSize, PageToken: token,
		})
		return page.GetAgents(), page.GetNextPageToken(), err
	})
}

// ListVersions gives the versions of an agent's lines, newest first. The last pair may have an error.
func (c *Client) ListVersions(ctx context.Context, agent string) iter.Seq2[*cachestorev1.SnapshotVersion, error] {
	return pages(func(token string) ([]*cachestorev1.SnapshotVersion, string, error) {
		ctx, cancel := c.withDeadline(ctx)
		defer cancel()
		page, err := c.agents.ListSnapshots(ctx, &cachestorev1.ListSnapshotsRequest{AgentId: agent, PageToken: token})
		return page.GetSnapshots(), page.GetNextPageToken(), err
	})
}

func pages[T any](read func(token string) ([]T, string, error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for token := ""; ; {
			page, next, err := read(token)
			if err != nil {
				var none T
				yield(none, typed(err))
				return
			}
			for _, each := range page {
				if !yield(each, nil) {
					return
				}
			}
			if token = next; token == "" {
				return
			}
		}
	}
}

// GetAgent gives an agent and the newest version of each of its lines, last used first.
func (c *Client) GetAgent(ctx context.Context, agent string) (*cachestorev1.Agent, error) {
	ctx, cancel := c.withDeadline(ctx)
	defer cancel()
	response, err := c.agents.GetAgent(ctx, &cachestorev1.GetAgentRequest{AgentId: agent})
	return response.GetAgent(), typed(err)
}

// Usage counts the bytes behind an agent, or behind all of the namespace if agent is empty, and which of them are shared.
func (c *Client) Usage(ctx context.Context, agent string) (*cachestorev1.GetUsageResponse, error) {
	ctx, cancel := c.withDeadline(ctx)
	defer cancel()
	response, err := c.agents.GetUsage(ctx, &cachestorev1.GetUsageRequest{AgentId: agent})
	return response, typed(err)
}

// UpdateAgent changes the fields of an agent that paths names: "labels", "labels.KEY", "is_pinned", "retained_versions".
func (c *Client) UpdateAgent(ctx context.Context, agent *cachestorev1.Agent, paths ...string) (*cachestorev1.Agent, error) {
	ctx, cancel := c.withDeadline(ctx)
	defer cancel()
	request := &cachestorev1.UpdateAgentRequest{Agent: agent, UpdateMask: &fieldmaskpb.FieldMask{Paths: paths}}
	response, err := c.agents.UpdateAgent(ctx, request)
	return response.GetAgent(), typed(err)
}

// ForkAgent starts an agent whose first version is another's. It copies no memory.
func (c *Client) ForkAgent(ctx context.Context, source, agent string, from At) (*cachestorev1.Agent, error) {
	ctx, cancel := c.withDeadline(ctx)
	defer cancel()
	response, err := c.agents.ForkAgent(ctx, &cachestorev1.ForkAgentRequest{
		SourceAgentId: source, AgentId: agent, KvIdentityHash: from.KVIdentityHash, Version: from.version(),
	})
	return response.GetAgent(), typed(err)
}

// RollbackAgent makes an old version the newest again, as a new version. expected is the newest version as the caller knows it:
// ABORTED if it is another; 0: whatever it is.
func (c *Client) RollbackAgent(ctx context.Context, agent string, to At, expected int64) (*cachestorev1.SnapshotVersion, error) {
	ctx, cancel := c.withDeadline(ctx)
	defer cancel()
	request := &cachestorev1.RollbackAgentRequest{AgentId: agent, KvIdentityHash: to.KVIdentityHash, Version: to.Version}
	if expected != 0 {
		request.ExpectedVersion = &expected
	}
	response, err := c.agents.RollbackAgent(ctx, request)
	return response.GetSnapshot(), typed(err)
}

// DeleteAgent forgets an agent, a pinned one only with force, and says when its bytes will be gone.
func (c *Client) DeleteAgent(ctx context.Context, agent string, force bool) (*cachestorev1.DeleteAgentResponse, error) {
	ctx, cancel := c.withDeadline(ctx)
	defer cancel()
	response, err := c.agents.DeleteAgent(ctx, &cachestorev1.DeleteAgentRequest{AgentId: agent, Force: force})
	return response, typed(err)
}

// ExportAgent writes the archive of a version, and gives the digest of its bytes. After an error what was written is no archive.
// An error of into is UNKNOWN, and wrapped.
func (c *Client) ExportAgent(ctx context.Context, agent string, which At, into io.Writer) (Digest, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.agents.ExportAgent(ctx, &cachestorev1.ExportAgentRequest{
		AgentId: agent, KvIdentityHash: which.KVIdentityHash, Version: which.version(),
	})
	hasher := newHasher()
	for err == nil {
		var response *cachestorev1.ExportAgentResponse
		if response, err = stream.Recv(); err != nil {
			break
		}
		if _, writeError := into.Write(response.GetData()); writeError != nil {
			return Digest{}, ofArchive(writeError)
		}
		hasher.write(response.GetData())
	}
	if !errors.Is(err, io.EOF) {
		return Digest{}, typed(err)
	}
	return hasher.digest(), nil
}

// ImportAgent reads an archive into a new version of an agent, which must be new unless replace is said. An error of archive is
// UNKNOWN, and wrapped.
func (c *Client) ImportAgent(ctx context.Context, agent string, archive io.Reader, replace bool) (*cachestorev1.SnapshotVersion, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.agents.ImportAgent(ctx)
	if err != nil {
		return nil, typed(err)
	}
	header := &cachestorev1.ImportAgentHeader{AgentId: agent, Replace: replace}
	err = stream.Send(&cachestorev1.ImportAgentRequest{Header: header})
	for buffer := make([]byte, pieceBytes); err == nil; {
		count, readError := readPiece(archive, buffer)
		if readError != nil {
			return nil, ofArchive(readError)
		}
		if count == 0 {
			break
		}
		err = stream.Send(&cachestorev1.ImportAgentRequest{Data: buffer[:count]})
	}
	// A send that failed with io.EOF: the service has refused, and says why in its answer.
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, typed(err)
	}
	response, err := stream.CloseAndRecv()
	return response.GetSnapshot(), typed(err)
}

// readPiece fills a buffer as far as the archive goes. [io.ReadFull] has one error for an archive's end and for a reader that was cut,
// such as the body of a download.
func readPiece(archive io.Reader, buffer []byte) (int, error) {
	count := 0
	for count < len(buffer) {
		read, err := archive.Read(buffer[count:])
		count += read
		if err == io.EOF {
			break
		}
		if err != nil {
			return count, err
		}
	}
	return count, nil
}

// Pull names an agent of a peer.
type Pull struct {
	// Peer of the store's configuration.
	Peer  string
	Agent string
	// LocalAgent is its name here; empty: the same.
	LocalAgent     string
	KVIdentityHash string
	// OnProgress may be nil.
	OnProgress func(*cachestorev1.TransferProgress)
}

// PullAgent lets the store copy an agent's line from a peer of its configuration. Safe to repeat.
func (c *Client) PullAgent(ctx context.Context, what Pull) (*cachestorev1.SnapshotVersion, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.agents.PullAgent(ctx, &cachestorev1.PullAgentRequest{
		Peer: what.Peer, AgentId: what.Agent, LocalAgentId: what.LocalAgent, KvIdentityHash: what.KVIdentityHash,
	})
	for err == nil {
		var response *cachestorev1.PullAgentResponse
		if response, err = stream.Recv(); err != nil {
			break
		}
		if done := response.GetDone(); done != nil {
			return done, nil
		}
		if what.OnProgress != nil {
			what.OnProgress(response.GetProgress())
		}
	}
	if errors.Is(err, io.EOF) {
		return nil, refused(codes.Internal, "pull", "it ended without saying how")
	}
	return nil, typed(err)
}
