package limiter

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
)

func TestIdentitiesHaveOneCanonicalTextExactlyWhereTheyAreOneJSONB(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)

	rapid.Check(t, func(t *rapid.T) {
		// Those of one field are often equal to each other.
		oneField := rapid.Map(drawnValue(), func(value any) Identity { return Identity{"a": value} })
		identities := rapid.SliceOfN(rapid.OneOf(oneField, oneField, drawnIdentity()), 2, 12).Draw(t, "identities")
		written := make([]string, len(identities))
		canonical := make([]string, len(identities))

		for i, identity := range identities {
			form, err := identity.canonical()
			require.NoError(t, err)

			canonical[i], written[i] = form.text, marshal(t, identity)
		}

		// The pairs of an identity with itself, as the application writes it and in
		// canonical form, are among them.
		var pairs []struct {
			Left, Right int
			Equal       bool
		}

		require.NoError(t, db.Raw(`
SELECT "left".n - 1 AS "left", "right".n - 1 AS "right", "left".text::jsonb = "right".text::jsonb AS equal
FROM jsonb_array_elements_text(?::jsonb) WITH ORDINALITY AS "left" (text, n)
CROSS JOIN jsonb_array_elements_text(?::jsonb) WITH ORDINALITY AS "right" (text, n)`,
			marshal(t, written), marshal(t, canonical)).Scan(&pairs).Error)
		require.Len(t, pairs, len(identities)*len(identities))

		for _, pair := range pairs {
			require.Equal(t, pair.Equal, canonical[pair.Left] == canonical[pair.Right],
				"%s and %s", written[pair.Left], written[pair.Right])
		}
	})
}

func TestIdentitiesAreReadBackAsTheyWereRegistered(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)

	rapid.Check(t, func(t *rapid.T) {
		request, err := prepare("agent", []Rule{{Identity: drawnIdentity().Draw(t, "identity"), Policy: Policy{Window: time.Hour}}}, nil)
		require.NoError(t, err)
		require.True(t, json.Valid([]byte(request.merged.text)))
		require.LessOrEqual(t, len(request.merged.text), MaxIdentityBytes)

		var printed string

		require.NoError(t, db.Raw("SELECT ?::jsonb::text", request.merged.text).Scan(&printed).Error)

		parsed, err := parseDocument(printed)
		require.NoError(t, err)
		require.Equal(t, request.merged, parsed)
	})
}

func TestSubsetsAreTheIdentitiesThatJSONBContains(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)

	rapid.Check(t, func(t *rapid.T) {
		merged := rapid.MapOfN(rapid.SampledFrom(drawnNames), drawnValue(), 0, MaxFields).Draw(t, "merged")
		whole, err := Identity(merged).canonical()
		require.NoError(t, err)

		subsets := whole.subsets()
		require.Len(t, distinct(slices.Clone(subsets)), 1<<len(merged)-1)

		// Others, many of them similar to a part of it.
		candidates := make([]string, 0, len(subsets))
		for _, subset := range subsets {
			candidates = append(candidates, subset.text)
		}

		for _, other := range rapid.SliceOfN(drawnIdentity(), 1, 20).Draw(t, "others") {
			for name := range maps.Keys(other) {
				if value, ok := merged[name]; ok && rapid.Bool().Draw(t, "same value") {
					other[name] = value
				}
			}

			similar, err := other.canonical()
			require.NoError(t, err)

			candidates = append(candidates, similar.text)
		}

		var contained []bool

		require.NoError(t, db.Raw(`SELECT ?::jsonb @> candidate.text::jsonb
FROM jsonb_array_elements_text(?::jsonb) WITH ORDINALITY AS candidate (text, n) ORDER BY n`,
			marshal(t, Identity(merged)), marshal(t, candidates)).Scan(&contained).Error)
		require.Len(t, contained, len(candidates))

		for i, candidate := range candidates {
			isSubset := candidate == "{}" || slices.ContainsFunc(subsets, func(subset document) bool { return subset.text == candidate })
			require.Equal(t, contained[i], isSubset, "%s in %s", candidate, whole.text)
		}
	})
}

// The registry's key is a btree key, of which PostgreSQL takes 2,704 bytes.
func TestAnIdentityOfTheLargestSizeCanBeRegistered(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}, &models.LegionIdentity{}))

	policy := Policy{Window: time.Hour, MaxAgents: Max(math.MaxInt64)}

	rapid.Check(t, func(t *rapid.T) {
		largest := drawnLargest().Draw(t, "largest")

		form, err := largest.canonical()
		require.NoError(t, err)
		require.Len(t, form.text, MaxIdentityBytes)

		require.NoError(t, Enforce(db, "agent", Rule{Identity: largest, Policy: policy}))

		var registered int64

		require.NoError(t, db.Model(&models.LegionIdentity{}).Where("identity = ?", jsonb(form.text)).Count(&registered).Error)
		require.EqualValues(t, 1, registered)

		name := slices.Min(slices.Collect(maps.Keys(largest)))
		largest[name] = fmt.Sprint(largest[name], "x")

		require.ErrorIs(t, Enforce(db, "agent", Rule{Identity: largest, Policy: policy}), ErrInvalidRule)
	})
}

// drawnNames are names that an identity is likely to share with another one.
var drawnNames = []string{"a", "b", "A", "é", "e\u0301", "a b", `"`, `\`, "<&>", "\u2028", "1", "true", "😀"}

func drawnIdentity() *rapid.Generator[Identity] {
	return rapid.Map(rapid.MapOfN(rapid.SampledFrom(drawnNames), drawnValue(), 0, 3),
		func(values map[string]any) Identity { return values })
}

// drawnValue draws values that are often equal to each other.
func drawnValue() *rapid.Generator[any] {
	return rapid.OneOf(
		drawnNumber().AsAny(),
		drawnNumber().AsAny(),
		rapid.SampledFrom([]any{true, false, "true", "1", "1.0", "", "a", "é", "e\u0301", `"`, `\u0061`, "\x01\x1f\x7f", "\u2028</script>", "😀", "null"}),
		rapid.SampledFrom([]any{
			1, int8(-1), int64(math.MinInt64), uint64(math.MaxUint64), float32(0.1), 0.1, float32(100), 1e2, 1e21, 5e-324, math.MaxFloat64,
			int64(1<<53 + 1), float64(1 << 53), uint8(1), math.Copysign(0, -1), 0,
		}),
		rapid.Map(rapid.String(), func(text string) any { return strings.ReplaceAll(text, "\x00", "") }),
		rapid.Float64Range(-1e300, 1e300).AsAny(),
		rapid.Int64().AsAny(),
	)
}

// drawnNumber draws a number in one of its many notations.
func drawnNumber() *rapid.Generator[json.Number] {
	return rapid.Custom(func(t *rapid.T) json.Number {
		digits := rapid.SampledFrom([]string{"1", "10", "100", "0", "5", "12", "120", "9007199254740993", "9007199254740992", strings.Repeat("123456789", 10)}).Draw(t, "digits")
		exponent := rapid.IntRange(-4, 4).Draw(t, "exponent")

		// Moving the point by n to the left is the same as an exponent that is n higher.
		left := rapid.IntRange(0, len(digits)+3).Draw(t, "left")
		exponent += left

		if len(digits) <= left {
			digits = strings.Repeat("0", left-len(digits)+1) + digits
		}

		whole, fraction := digits[:len(digits)-left], digits[len(digits)-left:]
		fraction += strings.Repeat("0", rapid.IntRange(0, 3).Draw(t, "zeros"))

		// JSON has no leading zeros, but for a whole part that is 0.
		number := strings.TrimLeft(whole, "0")
		if number == "" {
			number = "0"
		}

		if fraction != "" {
			number += "." + fraction
		}

		if exponent != 0 || rapid.Bool().Draw(t, "needless exponent") {
			number += rapid.SampledFrom([]string{"e", "E"}).Draw(t, "e")
			number += rapid.SampledFrom([]string{"%d", "%+d", "%03d"}).Draw(t, "exponent's form")
			number = fmt.Sprintf(number, exponent)
		}

		return json.Number(rapid.SampledFrom([]string{"", "-"}).Draw(t, "sign") + number)
	})
}

// drawnLargest draws an identity of MaxFields fields and MaxIdentityBytes, which no
// compression makes smaller.
func drawnLargest() *rapid.Generator[Identity] {
	const (
		syntax = len("{}") + MaxFields*len(`"":"",`) - len(",")
		digits = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
	)

	return rapid.Custom(func(t *rapid.T) Identity {
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		text := func(length int) string {
			text := make([]byte, length)
			for i := range text {
				text[i] = digits[random.IntN(len(digits))]
			}

			return string(text)
		}

		identity := Identity{}
		left := MaxIdentityBytes - syntax

		for i := range MaxFields {
			// Its number keeps a name from being another one's.
			name := strconv.Itoa(i) + text(rapid.IntRange(0, MaxFieldNameBytes-1).Draw(t, "name"))
			left -= len(name)
			size := left

			if following := MaxFields - 1 - i; following > 0 {
				size = rapid.IntRange(0, left-following*MaxFieldNameBytes).Draw(t, "size")
			}

			identity[name] = text(size)
			left -= size
		}

		return identity
	})
}

func marshal(t *rapid.T, value any) string {
	text, err := json.Marshal(value)
	require.NoError(t, err)

	return string(text)
}
