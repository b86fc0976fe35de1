package models_test

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
)

func pointer[T any](value T) *T { return &value }

// validUsage draws entries that Validate accepts.
func validUsage(t *rapid.T) models.Usage {
	counts := rapid.OneOf(rapid.Int64Range(0, math.MaxInt64/2), rapid.Int64Range(0, 3), rapid.Just(int64(math.MaxInt64/2)))
	text := rapid.StringOfN(rapid.Rune().Filter(func(r rune) bool { return r != 0 }), 0, 40, models.MaxUsageIDBytes)

	usage := models.Usage{
		ID:           text.Draw(t, "ID"),
		TotalTokens:  counts.Draw(t, "TotalTokens"),
		InputTokens:  counts.Draw(t, "InputTokens"),
		OutputTokens: counts.Draw(t, "OutputTokens"),
		Evals:        counts.Draw(t, "Evals"),
		Model:        text.Draw(t, "Model"),
	}
	if rapid.Bool().Draw(t, "at is said") {
		usage.At = time.UnixMilli(rapid.Int64Range(1, 1<<48).Draw(t, "At"))
	}

	if rapid.Bool().Draw(t, "index is said") {
		usage.MessageIndex = pointer(rapid.Int64Min(0).Draw(t, "MessageIndex"))
	}

	for _, key := range rapid.SliceOfNDistinct(text, 0, 3, rapid.ID).Draw(t, "keys") {
		if usage.Extra == nil {
			usage.Extra = make(map[string]any)
		}

		usage.Extra["application "+key] = rapid.OneOf(
			text.AsAny(),
			rapid.Bool().AsAny(),
			rapid.Just(any(nil)),
			rapid.Just(any(json.Number("9007199254740993.50"))),
			rapid.Just(any([]any{"nested", map[string]any{"key": json.Number("1")}})),
		).Draw(t, "value")
	}

	return usage
}

func TestUsageReadsBackAsItWasWritten(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		usage := validUsage(t)
		require.NoError(t, usage.Validate())

		document, err := json.Marshal(usage)
		require.NoError(t, err)

		var read models.Usage
		require.NoError(t, json.Unmarshal(document, &read))

		if usage.TotalTokens == 0 {
			usage.TotalTokens = usage.InputTokens + usage.OutputTokens
		}

		require.Equal(t, usage, read)
	})
}

func TestUsageIsWhatPostgresHolds(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)

	rapid.Check(t, func(rt *rapid.T) {
		usage := validUsage(rt)
		document, err := json.Marshal(usage)
		require.NoError(rt, err)

		var stored string
		require.NoError(rt, db.Raw("SELECT ?::jsonb::text", string(document)).Scan(&stored).Error)

		var read, direct models.Usage
		require.NoError(rt, json.Unmarshal([]byte(stored), &read))
		require.NoError(rt, json.Unmarshal(document, &direct))
		require.Equal(rt, direct, read)
	})
}

func TestUsageJSON(t *testing.T) {
	t.Parallel()

	at := time.Date(2024, time.February, 29, 12, 0, 0, 123_456_789, time.UTC)

	for name, test := range map[string]struct {
		usage    models.Usage
		document string
	}{
		"zero": {
			usage:    models.Usage{},
			document: `{"total_tokens":0}`,
		},
		"all fields": {
			usage: models.Usage{
				ID: "request", At: at, TotalTokens: 10, InputTokens: 7, OutputTokens: 2, Evals: 1,
				MessageIndex: pointer(int64(0)), Model: "large", Folded: 3, Extra: map[string]any{"b": "<&>", "a": 1},
			},
			document: `{"id":"request","at":1709208000123,"total_tokens":10,"input_tokens":7,"output_tokens":2,"evals":1,` +
				`"message_index":0,"model":"large","folded":3,"a":1,"b":"\u003c\u0026\u003e"}`,
		},
		"total from its parts": {
			usage:    models.Usage{InputTokens: 7, OutputTokens: 2},
			document: `{"total_tokens":9,"input_tokens":7,"output_tokens":2}`,
		},
		"no extra keys": {
			usage:    models.Usage{Evals: 1, Extra: map[string]any{}},
			document: `{"total_tokens":0,"evals":1}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			document, err := json.Marshal(test.usage)
			require.NoError(t, err)
			require.Equal(t, test.document, string(document))
		})
	}
}

func TestUsageReadsMalformedFieldsAsZero(t *testing.T) {
	t.Parallel()

	for value, count := range map[string]int64{
		`7`:                     7,
		`0`:                     0,
		`-0`:                    0,
		`7.0`:                   7,
		`0.1`:                   1,
		`6.5`:                   7,
		`1e2`:                   100,
		`1e-400`:                1,
		`-1`:                    0,
		`-1e400`:                0,
		`9223372036854775807`:   math.MaxInt64,
		`9223372036854775806.5`: math.MaxInt64,
		`9223372036854775808`:   math.MaxInt64,
		`1e400`:                 math.MaxInt64,
		`1e131071`:              math.MaxInt64,
		`"7"`:                   0,
		`""`:                    0,
		`null`:                  0,
		`true`:                  0,
		`[7]`:                   0,
		`{"value": 7}`:          0,
	} {
		t.Run(value, func(t *testing.T) {
			t.Parallel()

			for _, field := range []struct {
				key  string
				read func(models.Usage) int64
			}{
				{"total_tokens", func(u models.Usage) int64 { return u.TotalTokens }},
				{"input_tokens", func(u models.Usage) int64 { return u.InputTokens }},
				{"output_tokens", func(u models.Usage) int64 { return u.OutputTokens }},
				{"evals", func(u models.Usage) int64 { return u.Evals }},
				{"folded", func(u models.Usage) int64 { return u.Folded }},
			} {
				var usage models.Usage
				require.NoError(t, json.Unmarshal([]byte(fmt.Sprintf(`{"id": "kept", %q: %s}`, field.key, value)), &usage))
				require.Equal(t, count, field.read(usage), field.key)
				require.Equal(t, "kept", usage.ID)
			}
		})
	}
}

func TestUsageReadsTheRestOfAnEntryThatIsMalformedInPart(t *testing.T) {
	t.Parallel()

	var usage models.Usage
	require.NoError(t, json.Unmarshal([]byte(
		`{"id": 7, "at": "yesterday", "total_tokens": 12, "model": ["large"], "message_index": null, "cost": 1e400, "seed": 9007199254740993}`), &usage))
	require.Equal(t, models.Usage{
		TotalTokens: 12,
		Extra:       map[string]any{"cost": json.Number("1e400"), "seed": json.Number("9007199254740993")},
	}, usage)
}

func TestUsageReplacesWhatAReusedStructHeld(t *testing.T) {
	t.Parallel()

	usage := models.Usage{ID: "old", Evals: 3, Extra: map[string]any{"old": true}}
	require.NoError(t, json.Unmarshal([]byte(`{"total_tokens": 1}`), &usage))
	require.Equal(t, models.Usage{TotalTokens: 1}, usage)
}

func TestUsageMustBeAnObject(t *testing.T) {
	t.Parallel()

	for _, document := range []string{`7`, `"text"`, `[]`, `true`, `{"id": "a"`, ``} {
		var usage models.Usage
		require.Error(t, json.Unmarshal([]byte(document), &usage), document)
	}
}

func TestUsageValidate(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		usage models.Usage
		text  string // of the error, after the sentinel's; empty: valid
	}{
		"zero":         {usage: models.Usage{}},
		"largest sums": {usage: models.Usage{InputTokens: math.MaxInt64 - 1, OutputTokens: 1, Evals: math.MaxInt64}},
		"parts beyond int64 beside a total": {
			usage: models.Usage{TotalTokens: 1, InputTokens: math.MaxInt64, OutputTokens: math.MaxInt64},
		},
		"longest ID":         {usage: models.Usage{ID: strings.Repeat("é", models.MaxUsageIDBytes/2)}},
		"epoch":              {usage: models.Usage{At: time.UnixMilli(0)}},
		"first message":      {usage: models.Usage{MessageIndex: pointer(int64(0))}},
		"escaped text u0000": {usage: models.Usage{Extra: map[string]any{"pattern": `\u0000`}}},
		"largest entry": {
			usage: models.Usage{Extra: map[string]any{"note": strings.Repeat("n", models.MaxUsageBytes-len(`{"total_tokens":0,"note":""}`))}},
		},

		"negative total":  {usage: models.Usage{TotalTokens: -1}, text: "TotalTokens is negative: record what was consumed, at least 0"},
		"negative input":  {usage: models.Usage{InputTokens: -1}, text: "InputTokens is negative: record what was consumed, at least 0"},
		"negative output": {usage: models.Usage{OutputTokens: math.MinInt64}, text: "OutputTokens is negative: record what was consumed, at least 0"},
		"negative evals":  {usage: models.Usage{Evals: -1}, text: "Evals is negative: record what was consumed, at least 0"},
		"sum beyond int64": {
			usage: models.Usage{InputTokens: math.MaxInt64, OutputTokens: 1},
			text:  "InputTokens + OutputTokens is beyond int64",
		},
		"negative message": {usage: models.Usage{MessageIndex: pointer(int64(-1))}, text: "MessageIndex is negative: leave it nil for none"},
		"folded":           {usage: models.Usage{Folded: 1}, text: "Folded is set: it is the store's own, leave it 0"},
		"before 1970": {
			usage: models.Usage{At: time.Date(1969, time.December, 31, 0, 0, 0, 0, time.UTC)},
			text:  "At lies before 1970: leave it zero for the time of the append",
		},
		"ID that is too long": {
			usage: models.Usage{ID: strings.Repeat("x", models.MaxUsageIDBytes+1)},
			text:  "ID has 129 bytes, the limit is 128",
		},
		"ID with NUL":        {usage: models.Usage{ID: "a\x00b"}, text: "ID is not valid UTF-8 without NUL"},
		"ID that is no text": {usage: models.Usage{ID: "\xff"}, text: "ID is not valid UTF-8 without NUL"},
		"model with NUL":     {usage: models.Usage{Model: "\x00"}, text: "Model is not valid UTF-8 without NUL"},
		"extra key that is taken": {
			usage: models.Usage{Extra: map[string]any{"total_tokens": 1}},
			text:  `Extra has the key "total_tokens", which is a field of Usage: set the field`,
		},
		"extra value that is no JSON": {
			usage: models.Usage{Extra: map[string]any{"callback": func() {}}},
			text:  "Extra cannot be written as JSON: json: error calling MarshalJSON for type models.Usage: json: unsupported type: func()",
		},
		"extra value with NUL": {usage: models.Usage{Extra: map[string]any{"note": "secret\x00"}}, text: "Extra contains NUL, which jsonb cannot hold"},
		"extra key with NUL":   {usage: models.Usage{Extra: map[string]any{"secret\x00": 1}}, text: "Extra contains NUL, which jsonb cannot hold"},
		"NUL after a backslash": {
			usage: models.Usage{Extra: map[string]any{"note": "\\\x00"}}, text: "Extra contains NUL, which jsonb cannot hold",
		},
		"too large": {
			usage: models.Usage{Extra: map[string]any{"note": strings.Repeat("n", models.MaxUsageBytes)}},
			text:  "the entry has 4124 bytes as JSON, the limit is 4096: keep less in Extra",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			err := test.usage.Validate()
			if test.text == "" {
				require.NoError(t, err)

				return
			}

			require.ErrorIs(t, err, fault.ErrInvalidUsage)
			require.EqualError(t, err, "legion: invalid usage: "+test.text)
		})
	}
}

// What Validate accepts, jsonb accepts.
func TestValidUsageFitsIntoTheColumn(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)

	rapid.Check(t, func(rt *rapid.T) {
		usage := models.Usage{
			ID:    rapid.String().Draw(rt, "ID"),
			Model: rapid.String().Draw(rt, "Model"),
			Extra: rapid.MapOfN(rapid.String(), rapid.String().AsAny(), 0, 3).Draw(rt, "Extra"),
		}
		if usage.Validate() != nil {
			return
		}

		document, err := json.Marshal(usage)
		require.NoError(rt, err)

		var object bool
		require.NoError(rt, db.Raw("SELECT jsonb_typeof(?::jsonb) = 'object'", string(document)).Scan(&object).Error)
		require.True(rt, object)
	})
}

func FuzzUsageUnmarshal(f *testing.F) {
	for _, document := range []string{
		`{}`,
		`null`,
		`{"id": "a", "at": 1709208000123, "total_tokens": 10, "input_tokens": 7, "output_tokens": 3, "evals": 1}`,
		`{"message_index": 3, "model": "large", "folded": 60, "cost": 0.25}`,
		`{"total_tokens": "10", "evals": null, "at": -1, "id": 7}`,
		`{"total_tokens": 1e400, "evals": 0.1, "cost": 1e400}`,
		`{"total_tokens": 1e999999999999, "evals": -0.0}`,
		`{"extra": {"deep": [[[[]]]]}, "": null}`,
		`{"total_tokens": 1, "total_tokens": 2}`,
		`[{"id": "a"}]`,
		"{\"id\": \"\\ud800\", \"model\": \"\xff\"}",
	} {
		f.Add([]byte(document))
	}

	f.Fuzz(func(t *testing.T, document []byte) {
		var usage models.Usage
		if json.Unmarshal(document, &usage) != nil {
			return
		}

		for field, count := range map[string]int64{
			"TotalTokens": usage.TotalTokens, "InputTokens": usage.InputTokens, "OutputTokens": usage.OutputTokens,
			"Evals": usage.Evals, "Folded": usage.Folded,
		} {
			require.GreaterOrEqual(t, count, int64(0), field)
		}

		// What has been read once stays as it is. A zero total would stand for its parts,
		// which a foreign entry may not have meant.
		if usage.TotalTokens == 0 {
			usage.InputTokens, usage.OutputTokens = 0, 0
		}

		written, err := json.Marshal(usage)
		require.NoError(t, err)

		var read models.Usage
		require.NoError(t, json.Unmarshal(written, &read))
		require.Equal(t, usage, read)
	})
}
