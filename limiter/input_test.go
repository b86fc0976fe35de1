package limiter_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/big"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
	"gorm.io/gorm/utils/tests"

	"github.com/legion-gorm/legion/limiter"
)

// secret stands in every value that a text must not repeat.
const secret = "s3cr3t"

// setupUnreachable returns a connection to nowhere: what touches the database fails
// with an error of the network instead of the one that a test expects.
func setupUnreachable(t *testing.T) *gorm.DB {
	t.Helper()

	db, err := gorm.Open(postgres.Open("host=127.0.0.1 port=1 user=nobody sslmode=disable"),
		&gorm.Config{Logger: logger.Discard, DisableAutomaticPing: true})
	require.NoError(t, err)
	closeAfter(t, db)

	return db
}

type (
	failingText struct{}
	binaryText  struct{}
	namedText   string
	namedNumber int32
	nested      struct{ Value string }
)

func (failingText) MarshalText() ([]byte, error) { return nil, errors.New(secret) }
func (binaryText) MarshalText() ([]byte, error)  { return []byte(secret + "\xff"), nil }

func TestInvalidRulesAreErrorsThatNameFieldAndRemedy(t *testing.T) {
	t.Parallel()

	value := func(value any) []limiter.Rule {
		return []limiter.Rule{recordOnly(tenant), {Name: "second", Identity: limiter.Identity{"email": value}, Policy: recordOnly(nil).Policy}}
	}
	policy := func(policy limiter.Policy) []limiter.Rule {
		return []limiter.Rule{{Identity: tenant, Policy: policy}}
	}
	identity := func(identity limiter.Identity) []limiter.Rule { return []limiter.Rule{recordOnly(identity)} }

	fields := func(from, to int) limiter.Identity {
		identity := limiter.Identity{}
		for i := from; i <= to; i++ {
			identity[fmt.Sprintf("field%d", i)] = secret
		}

		return identity
	}

	const flatten = `rule 2 ("second"): identity field "email" is a %s: flatten it into fields that are strings, numbers or booleans`

	for name, test := range map[string]struct {
		rules []limiter.Rule
		text  string
	}{
		"no rules":       {nil, "there are no rules: pass at least one, or do not call Enforce for an agent without limits"},
		"too many rules": {make([]limiter.Rule, limiter.MaxRules+1), "there are 65 rules: the limit is 64"},

		"a nil identity": {identity(nil), "rule 1: the identity is nil: name the group that the rule limits, or say limiter.Everyone()"},
		"a nil identity among others": {
			[]limiter.Rule{recordOnly(tenant), {Name: "forgotten", Policy: recordOnly(nil).Policy}}, `rule 2 ("forgotten"): the identity is nil`,
		},
		"too many fields":                 {identity(fields(1, 9)), "rule 1: the identity has more than 8 fields: drop those that limit nothing"},
		"too many fields together":        {[]limiter.Rule{recordOnly(fields(1, 6)), recordOnly(fields(5, 9))}, "the rules have 9 identity fields together: the limit is 8, drop those that limit nothing"},
		"too large":                       {identity(limiter.Identity{"tenant": strings.Repeat(secret, 400)}), "the identities have 2413 bytes together as JSON: the limit is 2000, use shorter values, for example a hash"},
		"too large by its escapes":        {identity(limiter.Identity{"tenant": strings.Repeat("\x01", 400)}), "the identities have 2413 bytes together as JSON: the limit is 2000"},
		"too large together":              {[]limiter.Rule{recordOnly(limiter.Identity{"a": strings.Repeat(secret, 200)}), recordOnly(limiter.Identity{"b": strings.Repeat(secret, 200)})}, "the identities have 2415 bytes together as JSON: the limit is 2000"},
		"an empty field name":             {identity(limiter.Identity{"": secret}), "rule 1: an identity field has an empty name: give it 1 to 64 bytes"},
		"a long field name":               {identity(limiter.Identity{strings.Repeat("x", 65): secret}), "rule 1: an identity field's name has 65 bytes: the limit is 64"},
		"a field name with NUL":           {identity(limiter.Identity{"ten\x00ant": secret}), "rule 1: an identity field's name is not valid UTF-8 without NUL"},
		"a field name that is no UTF-8":   {identity(limiter.Identity{"ten\xffant": secret}), "rule 1: an identity field's name is not valid UTF-8 without NUL"},
		"rules that disagree":             {[]limiter.Rule{recordOnly(tenant), recordOnly(limiter.Identity{"tenant": secret})}, `rule 2: identity field "tenant" has another value than in an earlier rule: an agent has one value for a field, so use another field name`},
		"rules that disagree on the type": {[]limiter.Rule{recordOnly(limiter.Identity{"seats": 1}), recordOnly(limiter.Identity{"seats": "1"})}, `rule 2: identity field "seats" has another value`},

		"null":                          {value(nil), `rule 2 ("second"): identity field "email" is null: leave the field out, or give it a string, number or boolean`},
		"a nil *string":                 {value((*string)(nil)), `identity field "email" is null`},
		"a nil *int":                    {value((*int)(nil)), `identity field "email" is null`},
		"a nil pointer that marshals":   {value((*netip.Addr)(nil)), `identity field "email" is null`},
		"a *string":                     {value(pointer(secret)), fmt.Sprintf(flatten, "*string")},
		"a map":                         {value(map[string]any{"x": secret}), fmt.Sprintf(flatten, "map[string]interface {}")},
		"an identity":                   {value(limiter.Identity{"x": secret}), fmt.Sprintf(flatten, "limiter.Identity")},
		"a slice":                       {value([]string{secret}), fmt.Sprintf(flatten, "[]string")},
		"bytes":                         {value([]byte(secret)), fmt.Sprintf(flatten, "[]uint8")},
		"raw JSON":                      {value(json.RawMessage(`"` + secret + `"`)), fmt.Sprintf(flatten, "json.RawMessage")},
		"a struct":                      {value(nested{secret}), fmt.Sprintf(flatten, "limiter_test.nested")},
		"a function":                    {value(func() {}), fmt.Sprintf(flatten, "func()")},
		"a complex number":              {value(complex(1, 2)), fmt.Sprintf(flatten, "complex128")},
		"text with NUL":                 {value(secret + "\x00"), `identity field "email" is not valid UTF-8 without NUL: encode it, for example as base64`},
		"text that is no UTF-8":         {value(secret + "\xc3\x28"), `identity field "email" is not valid UTF-8 without NUL`},
		"a named text that is no UTF-8": {value(namedText(secret + "\xff")), `identity field "email" is not valid UTF-8 without NUL`},
		"text of its own that fails":    {value(failingText{}), `identity field "email" is a limiter_test.failingText that cannot be written as text`},
		"text of its own, no UTF-8":     {value(binaryText{}), `identity field "email" is not valid UTF-8 without NUL`},
		"not a number":                  {value(math.NaN()), `identity field "email" is not a finite number: give it a value that JSON can hold`},
		"infinite":                      {value(math.Inf(1)), `identity field "email" is not a finite number`},
		"infinite in 32 bits":           {value(float32(math.Inf(-1))), `identity field "email" is not a finite number`},
		"json.Number: empty":            {value(json.Number("")), `identity field "email" is a json.Number that is not a number`},
		"json.Number: text":             {value(json.Number(secret)), `identity field "email" is a json.Number that is not a number`},
		"json.Number: a JSON string":    {value(json.Number(`"1"`)), `identity field "email" is a json.Number that is not a number`},
		"json.Number: null":             {value(json.Number("null")), `identity field "email" is a json.Number that is not a number`},
		"json.Number: an array":         {value(json.Number("[1]")), `identity field "email" is a json.Number that is not a number`},
		"json.Number: NaN":              {value(json.Number("NaN")), `identity field "email" is a json.Number that is not a number`},
		"json.Number: hexadecimal":      {value(json.Number("0x10")), `identity field "email" is a json.Number that is not a number`},
		"json.Number: a leading zero":   {value(json.Number("01")), `identity field "email" is a json.Number that is not a number`},
		"json.Number: space before":     {value(json.Number(" 1")), `identity field "email" is a json.Number that is not a number`},
		"json.Number: space after":      {value(json.Number("1 ")), `identity field "email" is a json.Number that is not a number`},
		"json.Number: two":              {value(json.Number("1 2")), `identity field "email" is a json.Number that is not a number`},
		"json.Number: an injection":     {value(json.Number(`1, "admin": true`)), `identity field "email" is a json.Number that is not a number`},
		"json.Number: too large":        {value(json.Number("1e2001")), `identity field "email" is a number of more than 2000 digits: give it as a string`},
		"json.Number: far too large":    {value(json.Number("1e99999999999999999999")), `identity field "email" is a number of more than 2000 digits`},
		"json.Number: far too small":    {value(json.Number("1e-99999999999999999999")), `identity field "email" is a number of more than 2000 digits`},
		"json.Number: too many digits":  {value(json.Number(strings.Repeat("7", 2001))), `identity field "email" is a number of more than 2000 digits`},

		"an empty policy":      {policy(limiter.Policy{}), "rule 1: the policy is empty and the plugin has no default policy: set a Window and limits, or legion.WithDefaultPolicy"},
		"no window":            {policy(limiter.Policy{MaxAgents: limiter.Max(1)}), "rule 1: Window must be at least 1µs: set how far back the limits look"},
		"a negative window":    {policy(limiter.Policy{Window: -time.Second}), "rule 1: Window must be at least 1µs"},
		"a window too short":   {policy(limiter.Policy{Window: 999 * time.Nanosecond}), "rule 1: Window must be at least 1µs"},
		"negative MaxAgents":   {policy(maxAgents(nil, -1).Policy), "rule 1: the limit on agents is negative: use nil for unlimited, or at least 0"},
		"negative MaxRunning":  {policy(maxRunning(nil, -1).Policy), "rule 1: the limit on running agents is negative: use nil for unlimited, or at least 0"},
		"negative MaxTokens":   {policy(maxTokens(nil, math.MinInt64).Policy), "rule 1: the limit on tokens is negative"},
		"negative MaxEvals":    {policy(maxEvals(nil, -5).Policy), "rule 1: the limit on evals is negative"},
		"one of two is faulty": {[]limiter.Rule{maxAgents(tenant, 1), maxAgents(tenant, -1)}, "rule 2: the limit on agents is negative"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db := setupUnreachable(t)

			decision, err := limiter.Admit(db, "agent", test.rules...)
			require.Nil(t, decision)
			require.ErrorIs(t, err, limiter.ErrInvalidRule)
			require.NotErrorIs(t, err, limiter.ErrExceeded)
			require.True(t, strings.HasPrefix(err.Error(), "legion: invalid rule: "), err)
			require.ErrorContains(t, err, test.text)
			require.NotContains(t, err.Error(), secret)

			require.EqualError(t, limiter.Enforce(db, "agent", test.rules...), err.Error())
			require.EqualError(t, limiter.EnforceAll(db,
				limiter.Admission{AgentID: "first", Rules: []limiter.Rule{recordOnly(tenant)}},
				limiter.Admission{AgentID: "agent", Rules: test.rules},
			), err.Error())
		})
	}
}

func TestInvalidAgentIDsAreErrorsThatNameTheRemedy(t *testing.T) {
	t.Parallel()

	db := setupUnreachable(t)

	for agentID, text := range map[string]string{
		"":                                  "legion: invalid agent ID: it is empty: give every agent an ID of 1 to 512 bytes",
		strings.Repeat("x", 513):            "legion: invalid agent ID: it has 513 bytes: the limit is 512, use a hash",
		strings.Repeat(secret, 64*1024/6):   "legion: invalid agent ID: it has 65532 bytes: the limit is 512, use a hash",
		strings.Repeat("é", 257):            "legion: invalid agent ID: it has 514 bytes: the limit is 512, use a hash",
		secret + "\x00":                     "legion: invalid agent ID: it contains NUL, which text cannot hold",
		secret + "\xff":                     "legion: invalid agent ID: it is not valid UTF-8: encode it, for example as base64",
		"\xed\xa0\x80, half of a character": "legion: invalid agent ID: it is not valid UTF-8: encode it, for example as base64",
	} {
		for _, err := range []error{
			limiter.Enforce(db, agentID, recordOnly(tenant)),
			limiter.EnforceAll(db, limiter.Admission{AgentID: agentID, Rules: []limiter.Rule{recordOnly(tenant)}}),
			limiter.Release(db, agentID),
		} {
			require.ErrorIs(t, err, limiter.ErrInvalidAgentID)
			require.EqualError(t, err, text)
		}
	}
}

func TestUnusableConnectionsAreErrors(t *testing.T) {
	t.Parallel()

	other, err := gorm.Open(tests.DummyDialector{}, &gorm.Config{Logger: logger.Discard})
	require.NoError(t, err)

	failed := errors.New("an earlier failure")
	broken := setupUnreachable(t).Session(&gorm.Session{})
	require.ErrorIs(t, broken.AddError(failed), failed)

	for name, test := range map[string]struct {
		db     *gorm.DB
		target error
		text   string
	}{
		"nil":              {nil, limiter.ErrInvalidConfig, "legion: invalid configuration: the *gorm.DB is nil: pass the connection that gorm.Open returned"},
		"zero":             {&gorm.DB{}, limiter.ErrInvalidConfig, "legion: invalid configuration: the *gorm.DB is nil: pass the connection that gorm.Open returned"},
		"another dialect":  {other, limiter.ErrInvalidConfig, `legion: invalid configuration: the dialect is "dummy": Legion needs gorm.io/driver/postgres`},
		"an earlier error": {broken, failed, "legion: the *gorm.DB that was passed has failed before: an earlier failure"},
	} {
		for _, err := range []error{
			limiter.Enforce(test.db, "agent", recordOnly(tenant)),
			limiter.EnforceAll(test.db, limiter.Admission{AgentID: "agent", Rules: []limiter.Rule{recordOnly(tenant)}}),
			limiter.Release(test.db, "agent"),
		} {
			require.ErrorIs(t, err, test.target, name)
			require.EqualError(t, err, test.text, name)
		}
	}
}

func TestEveryScalarIsAValue(t *testing.T) {
	t.Parallel()

	db := setup(t)

	for name, test := range map[string]struct {
		value  any
		stored string
	}{
		"text":                     {`a "quoted" \ <é> 'text' {"x": 1}; --` + "\t\n\u2028", `"a \"quoted\" \\ <é> 'text' {\"x\": 1}; --\t\n` + "\u2028" + `"`},
		"empty text":               {"", `""`},
		"text of a named type":     {namedText("pro"), `"pro"`},
		"an address":               {netip.MustParseAddr("203.0.113.42"), `"203.0.113.42"`},
		"a time":                   {time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC), `"2024-05-06T07:08:09Z"`},
		"a large number as text":   {big.NewInt(5), `"5"`},
		"true":                     {true, `true`},
		"an int of a named type":   {namedNumber(-5), `-5`},
		"a duration":               {time.Second, `1000000000`},
		"the smallest int64":       {int64(math.MinInt64), `-9223372036854775808`},
		"the largest uint64":       {uint64(math.MaxUint64), `18446744073709551615`},
		"a fraction":               {0.1, `0.1`},
		"a fraction in 32 bits":    {float32(0.1), `0.1`},
		"minus zero":               {math.Copysign(0, -1), `0`},
		"a small float":            {5e-324, `0.` + strings.Repeat("0", 323) + `5`},
		"a large float":            {1e300, `1` + strings.Repeat("0", 300)},
		"json.Number: precise":     {json.Number("123456789012345678901234567890.123456789"), `123456789012345678901234567890.123456789`},
		"json.Number: an exponent": {json.Number("-12.50e-1"), `-1.25`},
		"json.Number: zeros":       {json.Number("0.000"), `0`},
	} {
		require.NoError(t, limiter.Enforce(db, name, maxAgents(limiter.Identity{name: test.value}, 1)), name)

		var stored string

		require.NoError(t, db.Raw("SELECT (metadata -> ?)::text FROM legion_agents WHERE agent_id = ?", name, name).Scan(&stored).Error)
		require.Equal(t, test.stored, stored, name)
		requireDenied(t, limiter.Enforce(db, "another", maxAgents(limiter.Identity{name: test.value}, 1)), limiter.LimitAgents)
	}
}

func TestTheLargestInputIsAdmitted(t *testing.T) {
	t.Parallel()

	db := setup(t)
	agentID := strings.Repeat("é", 256)
	rules := make([]limiter.Rule, limiter.MaxRules)

	// Eight fields with names of 64 bytes, and together as many bytes as there may be.
	widest := limiter.Identity{}

	for i := range limiter.MaxFields {
		name := strings.Repeat(fmt.Sprint(i), limiter.MaxFieldNameBytes)
		widest[name] = strings.Repeat("x", 180)

		if i == 0 {
			widest[name] = strings.Repeat("x", limiter.MaxIdentityBytes-len(`{}`)-8*(64+len(`"":""`))-7-7*180)
		}

		rules[i] = everyLimit(limiter.Identity{name: widest[name]})
	}

	for i := limiter.MaxFields; i < len(rules); i++ {
		rules[i] = everyLimit(widest)
	}

	require.NoError(t, limiter.Enforce(db, agentID, rules...))
	require.Equal(t, []string{agentID}, agentIDs(t, db))
	require.Len(t, registered(t, db), limiter.MaxFields+1)
	requireDenied(t, limiter.Enforce(db, "another", maxAgents(widest, 1)), limiter.LimitAgents)

	// Values that do not compress, as the registry's index holds them.
	for i, name := range []string{"first", "second"} {
		random := limiter.Identity{"hash": incompressible(1900 + i)}
		require.NoError(t, limiter.Enforce(db, name, maxAgents(random, 1)))
	}

	widest["one more"] = ""
	require.ErrorIs(t, limiter.Enforce(db, agentID, recordOnly(widest)), limiter.ErrInvalidRule)
}

// incompressible is ASCII text that PostgreSQL cannot compress.
func incompressible(length int) string {
	text, state := make([]byte, length), uint32(length)

	for i := range text {
		state = state*1664525 + 1013904223
		text[i] = 'A' + byte(state>>24)%58
	}

	return strings.ReplaceAll(string(text), `\`, "_")
}
