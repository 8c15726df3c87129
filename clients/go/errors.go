package kvasir

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	commonv1 "kvasir.org/client/gen/kvasir/common/v1"
	inferencev1 "kvasir.org/client/gen/kvasir/inference/v1"
)

const (
	domain       = "kvasir"
	reasonPrefix = "ERROR_REASON_"
)

// Error is a refusal of a service, of gRPC, or of this client.
//
// Only UNAVAILABLE and RESOURCE_EXHAUSTED are worth asking again unchanged, after RetryAfter.
// [errors.Is] with context.Canceled and context.DeadlineExceeded tells those two.
type Error struct {
	Code codes.Code
	// Reason is for programs. ERROR_REASON_UNSPECIFIED: one that this client does not know, or none was given.
	Reason commonv1.ErrorReason
	// ReasonName is the reason as it was sent, "HEAD_MOVED", also where Reason does not know it.
	ReasonName string
	Message    string
	// Field that is wrong; empty if none was named.
	Field string
	// RetryAfter is nil where waiting does not help, or the service said nothing about it.
	RetryAfter *time.Duration
	Metadata   map[string]string

	status *status.Status
	cause  error
}

func (e *Error) Error() string {
	return fmt.Sprintf("kvasir: %s (%s): %s", e.CodeName(), e.ReasonName, e.Message)
}

// CodeName is the code as gRPC's documents write it: NOT_FOUND.
func (e *Error) CodeName() string { return codeName(e.Code) }

// GRPCStatus is the status as it came, for [status.FromError].
func (e *Error) GRPCStatus() *status.Status { return e.status }

// Unwrap gives the error of the caller's own reader or writer of an archive; nil for others.
func (e *Error) Unwrap() error { return e.cause }

// Is tells contexts' own errors.
func (e *Error) Is(target error) bool {
	return (target == context.Canceled && e.Code == codes.Canceled) ||
		(target == context.DeadlineExceeded && e.Code == codes.DeadlineExceeded)
}

// HasReason tells whether an error is a refusal for this reason.
func HasReason(err error, reason commonv1.ErrorReason) bool {
	var found *Error
	return errors.As(err, &found) && found.Reason == reason
}

// AsError is the typed error of a failed call; nil for nil.
func AsError(err error) *Error {
	if err == nil {
		return nil
	}
	var found *Error
	if errors.As(err, &found) {
		return found
	}
	return fromStatus(status.Convert(contextFree(err)))
}

// typed is AsError as an error: a nil *Error in an error is not nil.
func typed(err error) error {
	if err == nil {
		return nil
	}
	return AsError(err)
}

// contextFree is the status of a context that ended before gRPC saw it.
func contextFree(err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return status.FromContextError(err).Err()
	}
	return err
}

func fromStatus(from *status.Status) *Error {
	found := &Error{Code: from.Code(), Message: from.Message(), ReasonName: codeName(from.Code()), status: from}
	for _, detail := range from.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.GetDomain() == domain {
				found.ReasonName, found.Metadata = detail.GetReason(), maps.Clone(detail.GetMetadata())
			}
		case *errdetails.BadRequest:
			if violations := detail.GetFieldViolations(); len(violations) > 0 {
				found.Field = violations[0].GetField()
			}
		case *errdetails.RetryInfo:
			delay := detail.GetRetryDelay().AsDuration()
			found.RetryAfter = &delay
		}
	}
	if found.Metadata == nil {
		found.Metadata = map[string]string{}
	}
	if field, has := found.Metadata["field"]; has && found.Field == "" {
		found.Field = field
		delete(found.Metadata, "field")
	}
	found.Reason = commonv1.ErrorReason(commonv1.ErrorReason_value[reasonPrefix+found.ReasonName])
	return found
}

// invalid is this client's own refusal of an argument.
func invalid(field, format string, values ...any) *Error {
	return refused(codes.InvalidArgument, field, fmt.Sprintf(format, values...))
}

func refused(code codes.Code, field, message string) *Error {
	reason := commonv1.ErrorReason_ERROR_REASON_INVALID_FIELD
	if code == codes.Unauthenticated {
		reason = commonv1.ErrorReason_ERROR_REASON_NO_CREDENTIAL
	}
	made := own(code, reason, field+": "+message)
	made.Field = field
	return made
}

// ofArchive is the failure of a caller's reader or writer.
func ofArchive(cause error) *Error {
	status := status.New(codes.Unknown, "archive: "+cause.Error())
	made := fromStatus(status)
	made.Field, made.cause = "archive", cause
	return made
}

// movedTo ends a stream whose rest is at another engine.
func movedTo(moved *inferencev1.Moved) *Error {
	made := own(codes.Unavailable, commonv1.ErrorReason_ERROR_REASON_TURN_MOVED,
		fmt.Sprintf("the turn went on to %q: Resume of a client of that engine takes the resume_token", moved.GetPeer()))
	made.Metadata["peer"], made.Metadata["resume_token"] = moved.GetPeer(), moved.GetResumeToken()
	return made
}

// cut ends a reply whose stream ended as if it were whole, as a proxy may end it.
func cut() *Error {
	return own(codes.Unavailable, commonv1.ErrorReason_ERROR_REASON_STREAM_CUT, "the reply was cut")
}

func own(code codes.Code, reason commonv1.ErrorReason, message string) *Error {
	return &Error{
		Code: code, Reason: reason, ReasonName: reason.String()[len(reasonPrefix):],
		Message: message, Metadata: map[string]string{}, status: status.New(code, message),
	}
}

func codeName(code codes.Code) string {
	names := [...]string{"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
		"PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
		"INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"}
	if int(code) < len(names) {
		return names[code]
	}
	return fmt.Sprintf("CODE_%d", code)
}
