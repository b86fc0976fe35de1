package models

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"math/big"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/legion-gorm/legion/internal/fault"
)

const (
	// MaxUsageIDBytes is the longest ID of a usage entry.
	MaxUsageIDBytes = 128

	// MaxUsageBytes is the largest usage entry, as JSON text.
	MaxUsageBytes = 4096
)

// Usage is what one LLM request, or one evaluation of code, has consumed: an
// element of the Usage column of [LegionAgent].
//
// As JSON it is an object with the keys id, at, total_tokens, input_tokens,
// output_tokens, evals, message_index, model and folded, and those of Extra.
type Usage struct {
	// ID names the entry, so that an append that is retried after a lost reply is
	// counted once. Empty: the store makes one, and a retry of the application's own
	// counts twice. At most [MaxUsageIDBytes].
	ID string

	// At is when the tokens were consumed, to the millisecond. Zero, and a time that
	// lies in the future by the database's clock, become the database's time of the
	// append.
	At time.Time

	// TotalTokens is what MaxTokens sums. Zero stands for InputTokens + OutputTokens.
	TotalTokens int64

	// InputTokens and OutputTokens are kept for the application. Limits do not read
	// them but through TotalTokens.
	InputTokens  int64
	OutputTokens int64

	// Evals are code evaluations, what MaxEvals sums.
	Evals int64

	// MessageIndex is the position of the request's message in the conversation.
	// Nil: not said.
	MessageIndex *int64

	// Model is the name of the language model. Empty: not said.
	Model string

	// Folded is the number of requests that this entry sums up, for an entry that
	// the store made of older ones; zero is an entry of its own. Do not set it.
	Folded int64

	// Extra are further keys of the application's own. They are lost when the entry
	// is folded. Numbers read back as json.Number.
	Extra map[string]any
}

// usageDocument is the JSON form of Usage, less Extra.
type usageDocument struct {
	ID           string `json:"id,omitempty"`
	At           *int64 `json:"at,omitempty"`
	TotalTokens  int64  `json:"total_tokens"`
	InputTokens  int64  `json:"input_tokens,omitempty"`
	OutputTokens int64  `json:"output_tokens,omitempty"`
	Evals        int64  `json:"evals,omitempty"`
	MessageIndex *int64 `json:"message_index,omitempty"`
	Model        string `json:"model,omitempty"`
	Folded       int64  `json:"folded,omitempty"`
}

// usageKeys are the keys that Extra cannot use.
var usageKeys = map[string]bool{
	"id": true, "at": true, "total_tokens": true, "input_tokens": true, "output_tokens": true,
	"evals": true, "message_index": true, "model": true, "folded": true,
}

// Validate reports the first reason why the entry cannot be recorded, an error
// that is limiter.ErrInvalidUsage: negative counts, a sum beyond int64, an ID that
// is too long or no valid text, an Extra key that is taken, or more than
// [MaxUsageBytes] in all.
func (u Usage) Validate() error {
	counts := []struct {
		field string
		value int64
	}{
		{"TotalTokens", u.TotalTokens},
		{"InputTokens", u.InputTokens},
		{"OutputTokens", u.OutputTokens},
		{"Evals", u.Evals},
	}
	for _, count := range counts {
		if count.value < 0 {
			return fmt.Errorf("%w: %s is negative: record what was consumed, at least 0", fault.ErrInvalidUsage, count.field)
		}
	}

	if u.TotalTokens == 0 && u.InputTokens > math.MaxInt64-u.OutputTokens {
		return fmt.Errorf("%w: InputTokens + OutputTokens is beyond int64", fault.ErrInvalidUsage)
	}

	if u.MessageIndex != nil && *u.MessageIndex < 0 {
		return fmt.Errorf("%w: MessageIndex is negative: leave it nil for none", fault.ErrInvalidUsage)
	}

	if u.Folded != 0 {
		return fmt.Errorf("%w: Folded is set: it is the store's own, leave it 0", fault.ErrInvalidUsage)
	}

	if !u.At.IsZero() && u.At.UnixMilli() < 0 {
		return fmt.Errorf("%w: At lies before 1970: leave it zero for the time of the append", fault.ErrInvalidUsage)
	}

	if len(u.ID) > MaxUsageIDBytes {
		return fmt.Errorf("%w: ID has %d bytes, the limit is %d", fault.ErrInvalidUsage, len(u.ID), MaxUsageIDBytes)
	}

	for _, text := range []struct{ field, value string }{{"ID", u.ID}, {"Model", u.Model}} {
		if !utf8.ValidString(text.value) || strings.ContainsRune(text.value, 0) {
			return fmt.Errorf("%w: %s is not valid UTF-8 without NUL", fault.ErrInvalidUsage, text.field)
		}
	}

	for key := range u.Extra {
		if usageKeys[key] {
			return fmt.Errorf("%w: Extra has the key %q, which is a field of Usage: set the field", fault.ErrInvalidUsage, key)
		}
	}

	document, err := json.Marshal(u)
	if err != nil {
		return fmt.Errorf("%w: Extra cannot be written as JSON: %w", fault.ErrInvalidUsage, err)
	}

	if len(document) > MaxUsageBytes {
		return fmt.Errorf("%w: the entry has %d bytes as JSON, the limit is %d: keep less in Extra", fault.ErrInvalidUsage, len(document), MaxUsageBytes)
	}

	// jsonb cannot hold U+0000, and the encoder writes it in this form only. An
	// escaped backslash in front of the text u0000 is no NUL.
	if strings.Contains(strings.ReplaceAll(string(document), `\\`, ``), `\u0000`) {
		return fmt.Errorf("%w: Extra contains NUL, which jsonb cannot hold", fault.ErrInvalidUsage)
	}

	return nil
}

// Tokens is what MaxTokens sums of the entry: TotalTokens, or where that is zero
// InputTokens + OutputTokens.
func (u Usage) Tokens() int64 {
	if u.TotalTokens == 0 {
		return u.InputTokens + u.OutputTokens
	}

	return u.TotalTokens
}

// MarshalJSON writes the entry as it is stored. It resolves a zero TotalTokens.
func (u Usage) MarshalJSON() ([]byte, error) {
	document := usageDocument{
		ID:           u.ID,
		TotalTokens:  u.Tokens(),
		InputTokens:  u.InputTokens,
		OutputTokens: u.OutputTokens,
		Evals:        u.Evals,
		MessageIndex: u.MessageIndex,
		Model:        u.Model,
		Folded:       u.Folded,
	}

	if !u.At.IsZero() {
		at := u.At.UnixMilli()
		document.At = &at
	}

	known, err := json.Marshal(document)
	if err != nil || len(u.Extra) == 0 {
		return known, err
	}

	extra, err := json.Marshal(u.Extra)
	if err != nil {
		return nil, err
	}

	// {known} and {extra} become {known,extra}: both are objects that are not empty.
	return append(append(known[:len(known)-1], ','), extra[1:]...), nil
}

// UnmarshalJSON reads an entry as tolerantly as the limiter counts it: a count
// that is no non-negative number reads as zero, a fraction is rounded up, a number
// beyond int64 reads as the largest int64. Only text that is no JSON object is an
// error.
func (u *Usage) UnmarshalJSON(text []byte) error {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil {
		return err
	}

	*u = Usage{
		ID:           tolerantString(fields["id"]),
		TotalTokens:  tolerantCount(fields["total_tokens"]),
		InputTokens:  tolerantCount(fields["input_tokens"]),
		OutputTokens: tolerantCount(fields["output_tokens"]),
		Evals:        tolerantCount(fields["evals"]),
		Model:        tolerantString(fields["model"]),
		Folded:       tolerantCount(fields["folded"]),
	}
	if at := tolerantCount(fields["at"]); at > 0 {
		u.At = time.UnixMilli(at)
	}

	if index, ok := fields["message_index"]; ok && string(index) != "null" {
		value := tolerantCount(index)
		u.MessageIndex = &value
	}

	for key, value := range fields {
		if usageKeys[key] {
			continue
		}

		if u.Extra == nil {
			u.Extra = make(map[string]any)
		}

		decoded, err := decodeExtra(value)
		if err != nil {
			return err
		}

		u.Extra[key] = decoded
	}

	return nil
}

// decodeExtra keeps numbers as they are written: jsonb holds ones that no float64
// does, and they must not cost the entry its tokens.
func decodeExtra(text json.RawMessage) (any, error) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()

	var value any
	err := decoder.Decode(&value)

	return value, err
}

func parseUsageEntries(text []byte) ([]Usage, error) {
	if len(text) == 0 {
		return nil, nil
	}

	var elements []json.RawMessage
	if err := json.Unmarshal(text, &elements); err != nil {
		if json.Valid(text) {
			return nil, nil // no array
		}

		return nil, fmt.Errorf("legion: the usage column is not JSON: %w", err)
	}

	entries := make([]Usage, 0, len(elements))

	for _, element := range elements {
		var entry Usage
		if err := json.Unmarshal(element, &entry); err == nil && string(element) != "null" {
			entries = append(entries, entry)
		}
	}

	return entries, nil
}

func tolerantString(text json.RawMessage) string {
	var value string
	if json.Unmarshal(text, &value) != nil {
		return ""
	}

	return value
}

// tolerantCount is the Go twin of the limiter's SQL: see the usage sums of package
// limiter.
func tolerantCount(text json.RawMessage) int64 {
	var number json.Number
	if len(text) == 0 || text[0] == '"' || json.Unmarshal(text, &number) != nil {
		return 0
	}

	// A big.Float takes any exponent that jsonb can hold without building all its
	// digits, as a big.Rat would.
	value, _, err := big.ParseFloat(number.String(), 10, 128, big.ToPositiveInf)
	if err != nil || value.Sign() <= 0 {
		return 0
	}

	count, accuracy := value.Int64()
	if accuracy == big.Below && count < math.MaxInt64 {
		count++
	}

	return count
}
