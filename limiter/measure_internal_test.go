package limiter

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A count that is missing must not be read as 0, which would allow.
func TestCountsAreAsManyAsWereAskedForOrAnError(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name  string
		value any
		valid bool
	}{
		{"as many", "[3, 9223372036854775807]", true},
		{"bytes, from a driver that does not make text of them", []byte("[3, 9223372036854775807]"), true},
		{"too few", "[3]", false},
		{"too many", "[3, 4, 5]", false},
		{"a null", "[3, null]", false},
		{"no array", "null", false},
		{"a fraction", "[3, 0.5]", false},
		{"beyond int64", "[3, 9223372036854775808]", false},
		{"NULL", nil, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			var one, two int64

			err := counts{&one, &two}.Scan(test.value)
			if !test.valid {
				require.Error(t, err)

				return
			}

			require.NoError(t, err)
			require.Equal(t, []int64{3, 9223372036854775807}, []int64{one, two})
		})
	}
}
