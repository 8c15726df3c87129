package kvasir

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"iter"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	commonv1 "kvasir.org/client/gen/kvasir/common/v1"
	inferencev1 "kvasir.org/client/gen/kvasir/inference/v1"
)

// More than a service sends: what an answer names is made room for.
const maxChoices = 128

// An engine that is well tells its name by then.
const soon = 2 * time.Second

// Turn is a request to continue a text. What is zero is not sent, and takes the default of the .proto.
type Turn struct {
	// Exactly one of Prompt (the whole text), Messages (the whole conversation) and Append (what follows the messages that the
	// agent remembers).
	Prompt   string
	Messages []*commonv1.Message
	Append   []*commonv1.Message

	// Agent whose memory is read and extended; empty: nothing is remembered.
	Agent string
	// ExpectedVersion is the newest version of the agent as the caller knows it (0: the agent must be new); nil: whatever it is.
	ExpectedVersion *int64
	// ExpectExisting refuses an agent that remembers nothing yet.
	ExpectExisting bool
	// MemoryMode is what the turn does with the memory: READ_WRITE with an Agent, if it is not said.
	MemoryMode inferencev1.MemoryMode
	// BaseVersion is the version to go on from: a rewind. 0: the newest.
	BaseVersion int64
	// ReplaceMemory lets Messages that begin another conversation take the place of the agent's. Else they are answered as a
	// branch, which is not remembered.
	ReplaceMemory bool
	// RequestID names the turn, so that it can be asked for again without being done twice; empty: a new one.
	RequestID string
	// Model is one that configuration names; empty: the loaded one.
	Model string
	// MaxTokens of the reply, here or in Sampling.
	MaxTokens int32
	Sampling  *inferencev1.Sampling
	// JSONSchema or Regex, at most one: what the reply must match.
	JSONSchema string
	Regex      string
	// Tools that the template may offer to the model.
	Tools []*inferencev1.Tool
	// KeepPartial remembers what was generated before a cancel, deadline or disconnect.
	KeepPartial bool
	Priority    inferencev1.Priority
	// LongestGapMs is how long the stream may wait for a token beside others' prompts, 20 to 1,000; 0: as the engine is set.
	LongestGapMs int32
}

// Choice is one of the replies that were asked for, as far as it has arrived.
type Choice struct {
	Text          string
	ReasoningText string
	TokenIDs      []uint32
	// Logprobs has one for each token, if they were asked for.
	Logprobs []*inferencev1.TokenLogprobs
	// Finished is nil until the choice ended.
	Finished *inferencev1.Finished
}

// Reply is a turn as far as its events have arrived.
type Reply struct {
	Started *inferencev1.Started
	Choices []Choice
}

// Text of the first choice, as far as it has arrived.
func (r *Reply) Text() string { return r.first().Text }

// Finished is how the first choice ended; nil until it did.
func (r *Reply) Finished() *inferencev1.Finished { return r.first().Finished }

func (r *Reply) first() *Choice {
	if len(r.Choices) == 0 {
		return &Choice{}
	}
	return &r.Choices[0]
}

// Add takes the next event of a turn.
func (r *Reply) Add(event *inferencev1.GenerateResponse) error {
	switch event := event.GetEvent().(type) {
	case *inferencev1.GenerateResponse_Started:
		r.Started = event.Started
	case *inferencev1.GenerateResponse_Delta:
		choice, err := r.choice(event.Delta.GetChoice())
		if err != nil {
			return err
		}
		choice.Text += event.Delta.GetText()
		choice.ReasoningText += event.Delta.GetReasoningText()
		choice.TokenIDs = append(choice.TokenIDs, event.Delta.GetTokenIds()...)
		choice.Logprobs = append(choice.Logprobs, event.Delta.GetLogprobs()...)
	case *inferencev1.GenerateResponse_Finished:
		choice, err := r.choice(event.Finished.GetChoice())
		if err != nil {
			return err
		}
		choice.Finished = event.Finished
	}
	return nil
}

func (r *Reply) choice(number int32) (*Choice, error) {
	if number < 0 || number >= maxChoices {
		return nil, refused(codes.Internal, "choice", "the engine sent one that was not asked for")
	}
	for len(r.Choices) <= int(number) {
		r.Choices = append(r.Choices, Choice{})
	}
	return &r.Choices[number], nil
}

// Generate streams a turn's events: Started, PrefillProgress, Deltas, Finished. Leaving the loop, or ending ctx, cancels the turn.
// The last pair may have an *Error, whose Metadata have the request_id: ask again with it. After Moved it is TURN_MOVED: see [Client.Resume];
// STREAM_CUT where the stream ended as if it were whole, as a proxy may end it.
func (c *Client) Generate(ctx context.Context, turn Turn) iter.Seq2[*inferencev1.GenerateResponse, error] {
	return func(yield func(*inferencev1.GenerateResponse, error) bool) {
		request, err := turn.request()
		if err != nil {
			yield(nil, err)
			return
		}
		c.events(ctx, request, yield)
	}
}

// Resume streams the rest of a reply that another engine began and gave to this one. The token is in the Metadata of the error
// that ended the stream there (TURN_MOVED, HANDOVER_UNCERTAIN), and "peer" is that engine's name for this one.
func (c *Client) Resume(ctx context.Context, resumeToken string) iter.Seq2[*inferencev1.GenerateResponse, error] {
	return func(yield func(*inferencev1.GenerateResponse, error) bool) {
		c.events(ctx, &inferencev1.GenerateRequest{ResumeToken: resumeToken}, yield)
	}
}

func (c *Client) events(
	ctx context.Context, request *inferencev1.GenerateRequest, yield func(*inferencev1.GenerateResponse, error) bool,
) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	hasBegun, isLeft, unfinished := false, false, max(int(request.GetSampling().GetN()), 1)
	noting := func(event *inferencev1.GenerateResponse, err error) bool {
		hasBegun = true
		if event.GetFinished() != nil {
			unfinished--
		}
		isLeft = !yield(event, err)
		return !isLeft
	}
	err := c.eventsHere(ctx, request, noting)
	if err != nil && !hasBegun {
		if holder := c.holder(ctx, AsError(err)); holder != nil {
			err = holder.eventsHere(ctx, request, noting)
		}
	}
	if err == nil && !isLeft && unfinished > 0 {
		err = cut()
	}
	if err != nil {
		broken := AsError(err)
		if id := request.GetRequestId(); id != "" {
			broken.Metadata["request_id"] = id
		}
		yield(nil, broken)
	}
}

// eventsHere streams what this engine sends, until the end or until yield has enough: nil then.
func (c *Client) eventsHere(
	ctx context.Context, request *inferencev1.GenerateRequest, yield func(*inferencev1.GenerateResponse, error) bool,
) error {
	stream, err := c.engine.Generate(ctx, request)
	if err != nil {
		return err
	}
	for {
		event, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if !yield(event, nil) {
			return nil
		}
		if moved := event.GetMoved(); moved != nil {
			return movedTo(moved)
		}
	}
}

// holder is the engine that has the agent of a refused turn, if it is known here and answers soon.
func (c *Client) holder(ctx context.Context, refusal *Error) *Client {
	owner := refusal.Metadata["owner"]
	if refusal.Reason != commonv1.ErrorReason_ERROR_REASON_AGENT_HELD_ELSEWHERE || owner == "" {
		return nil
	}
	for _, engine := range c.others {
		if engine.leaseOwner.Load() == owner { // an engine that starts again keeps its name
			return engine
		}
	}
	for _, engine := range c.others {
		if engine.ownName(ctx) == owner {
			return engine
		}
	}
	return nil
}

// ownName is the name under which the engine holds agents; empty if it does not answer.
func (c *Client) ownName(ctx context.Context) string {
	// A turn's own deadline may be far, and one that hangs, as a Mac that sleeps, must not keep it from the others.
	ctx, cancel := context.WithTimeout(ctx, min(c.timeout, soon))
	defer cancel()
	answer, err := c.engine.GetCapabilities(ctx, &inferencev1.GetCapabilitiesRequest{})
	if err != nil {
		return ""
	}
	c.leaseOwner.Store(answer.GetLeaseOwner())
	return answer.GetLeaseOwner()
}

// Reply is Generate to its end. After an error the reply has what arrived before it.
func (c *Client) Reply(ctx context.Context, turn Turn) (*Reply, error) {
	reply := &Reply{}
	for event, err := range c.Generate(ctx, turn) {
		if err == nil {
			err = reply.Add(event)
		}
		if err != nil {
			return reply, err
		}
	}
	return reply, nil
}

// ListTurns gives the turns of the caller's namespace that wait or run, the oldest first.
func (c *Client) ListTurns(ctx context.Context) ([]*inferencev1.Turn, error) {
	ctx, cancel := c.withDeadline(ctx)
	defer cancel()
	response, err := c.engine.ListTurns(ctx, &inferencev1.ListTurnsRequest{})
	return response.GetTurns(), typed(err)
}

// ListHotMemories gives those of the agents' memories that are hot, in the order asked; at most 1000 agents.
func (c *Client) ListHotMemories(ctx context.Context, agents ...string) ([]*inferencev1.HotMemory, error) {
	ctx, cancel := c.withDeadline(ctx)
	defer cancel()
	response, err := c.engine.ListHotMemories(ctx, &inferencev1.ListHotMemoriesRequest{AgentIds: agents})
	return response.GetMemories(), typed(err)
}

// CancelTurn ends the turns of a request, whoever reads them, and tells how each choice ended.
func (c *Client) CancelTurn(ctx context.Context, requestID string) ([]*inferencev1.Finished, error) {
	ctx, cancel := c.withDeadline(ctx)
	defer cancel()
	response, err := c.engine.CancelTurn(ctx, &inferencev1.CancelTurnRequest{RequestId: requestID})
	return response.GetFinished(), typed(err)
}

// Warm puts an agent's memory into the engine ahead of its next turn, and with an input also computes that prompt. Of the turn
// only Agent, Model, Tools and the input are looked at. Only ctx ends it: it may take long.
func (c *Client) Warm(ctx context.Context, turn Turn) (*inferencev1.WarmResponse, error) {
	request := &inferencev1.WarmRequest{AgentId: turn.Agent, Model: turn.Model, Tools: turn.Tools}
	switch given, err := turn.inputs(); {
	case err != nil:
		return nil, err
	case given == 0:
	case turn.Prompt != "":
		request.Input = &inferencev1.WarmRequest_Prompt{Prompt: turn.Prompt}
	case turn.Messages != nil:
		request.Input = &inferencev1.WarmRequest_Messages{Messages: list(turn.Messages)}
	default:
		request.Input = &inferencev1.WarmRequest_AppendMessages{AppendMessages: list(turn.Append)}
	}
	response, err := c.engine.Warm(ctx, request)
	return response, typed(err)
}

// CountTokens counts the tokens of a prompt, or of messages after the chat template: the prompt tokens of a turn with this input and
// no memory. Of the turn only Prompt or Messages, Tools and Model are looked at.
func (c *Client) CountTokens(ctx context.Context, turn Turn) (int64, error) {
	request := &inferencev1.CountTokensRequest{Model: turn.Model, Tools: turn.Tools}
	switch given, err := turn.inputs(); {
	case err != nil:
		return 0, err
	case given == 1 && turn.Prompt != "":
		request.Input = &inferencev1.CountTokensRequest_Prompt{Prompt: turn.Prompt}
	case given == 1 && turn.Messages != nil:
		request.Input = &inferencev1.CountTokensRequest_Messages{Messages: list(turn.Messages)}
	default:
		return 0, invalid("input", "expected exactly one of Prompt and Messages")
	}
	ctx, cancel := c.withDeadline(ctx)
	defer cancel()
	response, err := c.engine.CountTokens(ctx, request)
	return response.GetTokens(), typed(err)
}

// Embed computes the embeddings of texts, in their order. Only ctx ends it: it may take long.
func (c *Client) Embed(ctx context.Context, request *inferencev1.EmbedRequest) (*inferencev1.EmbedResponse, error) {
	response, err := c.engine.Embed(ctx, request)
	return response, typed(err)
}

func (t *Turn) request() (*inferencev1.GenerateRequest, error) {
	given, err := t.inputs()
	if err != nil {
		return nil, err
	}
	request := &inferencev1.GenerateRequest{
		RequestId: t.RequestID, Model: t.Model, AgentId: t.Agent, ExpectedVersion: t.ExpectedVersion,
		Tools: t.Tools, KeepPartial: t.KeepPartial, Priority: t.Priority,
		ExpectExisting: t.ExpectExisting, MemoryMode: t.MemoryMode, ReplaceMemory: t.ReplaceMemory,
	}
	if t.BaseVersion != 0 {
		request.BaseVersion = &t.BaseVersion
	}
	if t.LongestGapMs != 0 {
		request.LongestGapMs = &t.LongestGapMs
	}
	if request.RequestId == "" {
		request.RequestId = rand.Text()
	}
	switch {
	case given == 0:
		return nil, invalid("input", "expected exactly one of Prompt, Messages and Append")
	case t.Prompt != "":
		request.Input = &inferencev1.GenerateRequest_Prompt{Prompt: t.Prompt}
	case t.Messages != nil:
		request.Input = &inferencev1.GenerateRequest_Messages{Messages: list(t.Messages)}
	default:
		request.Input = &inferencev1.GenerateRequest_AppendMessages{AppendMessages: list(t.Append)}
	}
	if request.Sampling, err = t.sampling(); err != nil {
		return nil, err
	}
	switch {
	case t.JSONSchema != "" && t.Regex != "":
		return nil, invalid("response_format", "expected JSONSchema or Regex, got both")
	case t.JSONSchema != "":
		request.ResponseFormat = &inferencev1.GenerateRequest_JsonSchema{JsonSchema: t.JSONSchema}
	case t.Regex != "":
		request.ResponseFormat = &inferencev1.GenerateRequest_Regex{Regex: t.Regex}
	}
	return request, nil
}

func (t *Turn) sampling() (*inferencev1.Sampling, error) {
	if t.MaxTokens == 0 {
		return t.Sampling, nil
	}
	if t.Sampling == nil {
		return &inferencev1.Sampling{MaxTokens: &t.MaxTokens}, nil
	}
	if t.Sampling.MaxTokens != nil {
		return nil, invalid("max_tokens", "expected once, got it in Sampling too")
	}
	sampling := proto.CloneOf(t.Sampling)
	sampling.MaxTokens = &t.MaxTokens
	return sampling, nil
}

// inputs counts what was given of Prompt, Messages and Append: at most one.
func (t *Turn) inputs() (int, error) {
	count := 0
	for _, isGiven := range []bool{t.Prompt != "", t.Messages != nil, t.Append != nil} {
		if isGiven {
			count++
		}
	}
	if count > 1 {
		return count, invalid("input", "expected one of Prompt, Messages and Append, got %d", count)
	}
	return count, nil
}

func list(messages []*commonv1.Message) *inferencev1.MessageList {
	return &inferencev1.MessageList{Messages: messages}
}

// Conversation is a list of messages, shorter than its type's name.
func Conversation(messages ...*commonv1.Message) []*commonv1.Message { return messages }

// System is a message of the system.
func System(text string) *commonv1.Message { return message(commonv1.Role_ROLE_SYSTEM, text) }

// User is a message of the user.
func User(text string) *commonv1.Message { return message(commonv1.Role_ROLE_USER, text) }

// Assistant is a message of the model.
func Assistant(text string) *commonv1.Message { return message(commonv1.Role_ROLE_ASSISTANT, text) }

// ToolResult is what a tool answered to a call.
func ToolResult(callID, text string) *commonv1.Message {
	answer := message(commonv1.Role_ROLE_TOOL, text)
	answer.ToolCallId = callID
	return answer
}

func message(role commonv1.Role, text string) *commonv1.Message {
	part := &commonv1.Part{Content: &commonv1.Part_Text{Text: text}}
	return &commonv1.Message{Role: role, Parts: []*commonv1.Part{part}}
}
