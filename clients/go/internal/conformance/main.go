// The conformance program of the Go client: see tests/conformance/README.md for what each call takes and answers.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"time"

	kvasir "kvasir.org/client"
	cachestorev1 "kvasir.org/client/gen/kvasir/cachestore/v1"
	commonv1 "kvasir.org/client/gen/kvasir/common/v1"
	inferencev1 "kvasir.org/client/gen/kvasir/inference/v1"
)

type said struct {
	Role string `json:"role"`
	Text string `json:"text"`
}

type call struct {
	ID              int64    `json:"id"`
	Call            string   `json:"call"`
	TimeoutS        float64  `json:"timeout_s"`
	Address         string   `json:"address"`
	Token           *string  `json:"token"`
	CAFile          string   `json:"ca_file"`
	ServerName      string   `json:"server_name"`
	AgentID         string   `json:"agent_id"`
	SourceAgentID   string   `json:"source_agent_id"`
	LocalAgentID    string   `json:"local_agent_id"`
	Prompt          string   `json:"prompt"`
	Messages        []said   `json:"messages"`
	AppendMessages  []said   `json:"append_messages"`
	MaxTokens       *int32   `json:"max_tokens"`
	N               *int32   `json:"n"`
	RequestID       string   `json:"request_id"`
	ExpectedVersion *int64   `json:"expected_version"`
	Model           string   `json:"model"`
	Regex           string   `json:"regex"`
	CancelAfter     int      `json:"cancel_after"`
	NamePrefix      string   `json:"name_prefix"`
	PageSize        int32    `json:"page_size"`
	Version         int64    `json:"version"`
	Force           bool     `json:"force"`
	File            string   `json:"file"`
	Replace         bool     `json:"replace"`
	Peer            string   `json:"peer"`
	BaseVersion     int64    `json:"base_version"`
	MemoryMode      string   `json:"memory_mode"`
	ExpectExisting  bool     `json:"expect_existing"`
	ReplaceMemory   bool     `json:"replace_memory"`
	AgentIDs        []string `json:"agent_ids"`
	Count           int      `json:"count"`
	ResumeToken     string   `json:"resume_token"`
	Texts           []string `json:"texts"`
	Dimensions      *int32   `json:"dimensions"`
	Truncate        bool     `json:"truncate"`
	Engines         []string `json:"engines"`
}

type values = map[string]any

type program struct{ client *kvasir.Client }

func main() {
	program := &program{}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<24)
	out := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var told call
		if err := json.Unmarshal(lines.Bytes(), &told); err != nil {
			log.Fatal(err)
		}
		if err := out.Encode(program.answer(told)); err != nil {
			log.Fatal(err)
		}
	}
}

func (p *program) answer(told call) values {
	calls := map[string]func(context.Context, call) (values, error){
		"connect": p.connect, "count": p.count, "reply": p.reply, "stream": p.stream, "warm": p.warm,
		"list_agents": p.listAgents, "get_agent": p.getAgent, "fork": p.fork, "rollback": p.rollback, "delete": p.delete,
		"export": p.export, "import": p.importAgent, "pull": p.pull, "list_turns": p.listTurns, "cancel_turn": p.cancelTurn,
		"streams": p.streams, "list_hot_memories": p.listHotMemories, "usage": p.usage, "embed": p.embed,
	}
	ctx := context.Background()
	if told.TimeoutS != 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(told.TimeoutS*float64(time.Second)))
		defer cancel()
	}
	ok, err := calls[told.Call](ctx, told)
	if err != nil {
		return values{"id": told.ID, "error": refusal(kvasir.AsError(err))}
	}
	return values{"id": told.ID, "ok": ok}
}

func refusal(err *kvasir.Error) values {
	var retryAfter any
	if err.RetryAfter != nil {
		retryAfter = err.RetryAfter.Seconds()
	}
	return values{
		"code": err.CodeName(), "reason": err.ReasonName, "field": err.Field, "retry_after_s": retryAfter,
		"metadata": err.Metadata, "message": err.Message,
	}
}

func (p *program) connect(_ context.Context, told call) (values, error) {
	if p.client != nil {
		p.client.Close()
	}
	var options []kvasir.Option
	if told.Token != nil {
		options = append(options, kvasir.WithToken(*told.Token))
	}
	if told.CAFile != "" {
		pem, err := os.ReadFile(told.CAFile)
		if err != nil {
			return nil, err
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(pem)
		options = append(options, kvasir.WithTLS(&tls.Config{RootCAs: roots, ServerName: told.ServerName}))
	}
	client, err := kvasir.Dial(told.Address, options...)
	if err != nil {
		p.client = nil
		return nil, err
	}
	var others []*kvasir.Client
	for _, address := range told.Engines {
		other, err := kvasir.Dial(address)
		if err != nil {
			return nil, err
		}
		others = append(others, other)
	}
	p.client = client.WithEngines(others...)
	return values{}, nil
}

func (p *program) count(ctx context.Context, told call) (values, error) {
	tokens, err := p.client.CountTokens(ctx, turn(told))
	return values{"tokens": tokens}, err
}

func (p *program) embed(ctx context.Context, told call) (values, error) {
	request := &inferencev1.EmbedRequest{Model: told.Model, Dimensions: told.Dimensions, Truncate: told.Truncate}
	for _, text := range told.Texts {
		request.Inputs = append(request.Inputs, &inferencev1.EmbedInput{Input: &inferencev1.EmbedInput_Text{Text: text}})
	}
	answer, err := p.client.Embed(ctx, request)
	embeddings := []values{}
	for _, each := range answer.GetEmbeddings() {
		embeddings = append(embeddings, values{"values": each.GetValues(), "tokens": each.GetTokens()})
	}
	return values{"model": answer.GetModel(), "embeddings": embeddings}, err
}

func (p *program) reply(ctx context.Context, told call) (values, error) {
	reply, err := p.client.Reply(ctx, turn(told))
	return values{
		"text":           reply.Text(),
		"prompt_tokens":  reply.Started.GetPromptTokens(),
		"cached_tokens":  reply.Started.GetCachedTokens(),
		"source":         reply.Started.GetSource().String(),
		"continuation":   reply.Started.GetContinuation().String(),
		"parent_version": reply.Started.GetParentVersion(),
		"version":        reply.Finished().GetSnapshot().GetVersion(),
		"finish_reason":  reply.Finished().GetReason().String(),
		"request_id":     reply.Started.GetRequestId(),
	}, err
}

func (p *program) stream(ctx context.Context, told call) (values, error) {
	reply, deltas := kvasir.Reply{}, 0
	events := p.client.Generate(ctx, turn(told))
	if told.ResumeToken != "" {
		events = p.client.Resume(ctx, told.ResumeToken)
	}
	for event, err := range events {
		if err == nil {
			err = reply.Add(event)
		}
		if err != nil {
			return nil, err
		}
		if event.GetDelta() != nil {
			deltas++
		}
		if deltas > 0 && deltas == told.CancelAfter {
			break
		}
	}
	return values{
		"text": reply.Text(), "deltas": deltas, "is_finished": reply.Finished() != nil,
		"version": reply.Finished().GetSnapshot().GetVersion(),
	}, nil
}

func (p *program) streams(ctx context.Context, told call) (values, error) {
	ended := make(chan error)
	for range told.Count {
		go func() {
			_, err := p.client.Reply(ctx, turn(told))
			ended <- err
		}()
	}
	var failed error
	for range told.Count {
		if err := <-ended; err != nil {
			failed = err
		}
	}
	return values{"finished": told.Count}, failed
}

func (p *program) listTurns(ctx context.Context, _ call) (values, error) {
	turns := []values{}
	found, err := p.client.ListTurns(ctx)
	for _, each := range found {
		turns = append(turns, values{"request_id": each.GetRequestId(), "agent_id": each.GetAgentId(), "state": each.GetState().String()})
	}
	return values{"turns": turns}, err
}

func (p *program) cancelTurn(ctx context.Context, told call) (values, error) {
	reasons := []string{}
	ended, err := p.client.CancelTurn(ctx, told.RequestID)
	for _, each := range ended {
		reasons = append(reasons, each.GetReason().String())
	}
	return values{"finish_reasons": reasons}, err
}

func (p *program) listHotMemories(ctx context.Context, told call) (values, error) {
	memories := []values{}
	found, err := p.client.ListHotMemories(ctx, told.AgentIDs...)
	for _, each := range found {
		memories = append(memories, values{
			"agent_id": each.GetAgentId(), "tokens": each.GetTokens(), "version": each.GetVersion(), "is_stored": each.GetIsStored(),
		})
	}
	return values{"memories": memories}, err
}

func (p *program) usage(ctx context.Context, told call) (values, error) {
	usage, err := p.client.Usage(ctx, told.AgentID)
	return values{
		"agent_count": usage.GetAgentCount(), "snapshot_count": usage.GetSnapshotCount(), "blob_bytes": usage.GetBlobBytes(),
		"shared_bytes": usage.GetSharedBytes(),
	}, err
}

func (p *program) warm(ctx context.Context, told call) (values, error) {
	warm, err := p.client.Warm(ctx, turn(told))
	return values{
		"tokens": warm.GetTokens(), "cached_tokens": warm.GetCachedTokens(), "source": warm.GetSource().String(),
		"version": warm.GetVersion(),
	}, err
}

func (p *program) listAgents(ctx context.Context, told call) (values, error) {
	names := []string{}
	for agent, err := range p.client.ListAgents(ctx, kvasir.Agents{NamePrefix: told.NamePrefix, PageSize: told.PageSize}) {
		if err != nil {
			return nil, err
		}
		names = append(names, agent.GetAgentId())
	}
	return values{"agent_ids": names}, nil
}

func (p *program) getAgent(ctx context.Context, told call) (values, error) {
	agent, err := p.client.GetAgent(ctx, told.AgentID)
	if err != nil {
		return nil, err
	}
	line := agent.GetLines()[0]
	return values{"agent_id": agent.GetAgentId(), "version": line.GetVersion(), "token_count": line.GetTokenCount()}, nil
}

func (p *program) fork(ctx context.Context, told call) (values, error) {
	agent, err := p.client.ForkAgent(ctx, told.SourceAgentID, told.AgentID, kvasir.At{Version: told.Version})
	if err != nil {
		return nil, err
	}
	return values{"agent_id": agent.GetAgentId(), "version": agent.GetLines()[0].GetVersion()}, nil
}

func (p *program) rollback(ctx context.Context, told call) (values, error) {
	var expected int64
	if told.ExpectedVersion != nil {
		expected = *told.ExpectedVersion
	}
	version, err := p.client.RollbackAgent(ctx, told.AgentID, kvasir.At{Version: told.Version}, expected)
	return values{"version": version.GetVersion()}, err
}

func (p *program) delete(ctx context.Context, told call) (values, error) {
	_, err := p.client.DeleteAgent(ctx, told.AgentID, told.Force)
	return values{}, err
}

func (p *program) export(ctx context.Context, told call) (values, error) {
	file, err := os.Create(told.File)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	sent, err := p.client.ExportAgent(ctx, told.AgentID, kvasir.At{Version: told.Version}, file)
	if err != nil {
		return nil, err
	}
	if _, err = file.Seek(0, 0); err != nil {
		return nil, err
	}
	saved, err := kvasir.DigestOf(file)
	if saved != sent {
		return nil, fmt.Errorf("saved %v, sent %v", saved, sent)
	}
	return values{"hash": saved.Hash, "size_bytes": saved.SizeBytes}, err
}

func (p *program) importAgent(ctx context.Context, told call) (values, error) {
	file, err := os.Open(told.File)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return brought(p.client.ImportAgent(ctx, told.AgentID, file, told.Replace))
}

func (p *program) pull(ctx context.Context, told call) (values, error) {
	return brought(p.client.PullAgent(ctx, kvasir.Pull{Peer: told.Peer, Agent: told.AgentID, LocalAgent: told.LocalAgentID}))
}

func brought(version *cachestorev1.SnapshotVersion, err error) (values, error) {
	return values{"version": version.GetVersion(), "origin": version.GetOrigin().String()}, err
}

func turn(told call) kvasir.Turn {
	made := kvasir.Turn{
		Prompt: told.Prompt, Messages: messages(told.Messages), Append: messages(told.AppendMessages), Agent: told.AgentID,
		ExpectedVersion: told.ExpectedVersion, RequestID: told.RequestID, Model: told.Model, Regex: told.Regex,
		BaseVersion: told.BaseVersion, ExpectExisting: told.ExpectExisting, ReplaceMemory: told.ReplaceMemory,
		MemoryMode: inferencev1.MemoryMode(inferencev1.MemoryMode_value[told.MemoryMode]),
	}
	if told.MaxTokens != nil || told.N != nil {
		made.Sampling = &inferencev1.Sampling{MaxTokens: told.MaxTokens, N: told.N}
	}
	return made
}

func messages(given []said) []*commonv1.Message {
	makers := map[string]func(string) *commonv1.Message{"system": kvasir.System, "user": kvasir.User, "assistant": kvasir.Assistant}
	var made []*commonv1.Message
	for _, each := range given {
		made = append(made, makers[each.Role](each.Text))
	}
	return made
}
