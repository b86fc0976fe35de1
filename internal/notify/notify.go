// Package notify is the one home of how a change of an agent is told to whoever
// listens: the triggers that tell it, and the channel that they tell it on. The
// migration installs them and the store listens.
package notify

import (
	"fmt"
	"strconv"
	"strings"
)

// FunctionSuffix follows the name of the agents' table in that of the triggers'
// function. Each table has a function of its own, so that it can go with its table.
const FunctionSuffix = "_notify"

// The names of the triggers. They belong to their table, so they may be fixed.
const (
	rowsTrigger    = "legion_notify"
	changesTrigger = "legion_notify_update"
)

// version is raised with any change of the function or of a trigger. Migrate brings what
// is older up to it, and leaves what is newer alone.
const version = 1

// mark is in the first line of the function, in front of its version.
const mark = "-- Made by legion.WithNotify, version "

// channel is the SQL of the channel's name for two SQL expressions, the schema and the
// name of the agents' table. Any two tables have different ones, and it fits in a name.
// md5 would be shorter, but is an error on a server in FIPS mode.
const channel = `pg_catalog.concat('legion_', pg_catalog.left(pg_catalog.encode(pg_catalog.sha256(` +
	`pg_catalog.convert_to(pg_catalog.json_build_array(%s, %s)::text, 'UTF8')), 'hex'), 40))`

// Triggers are the names of the triggers.
func Triggers() []string { return []string{rowsTrigger, changesTrigger} }

// Source is the body of the function, as the catalogue has it.
func Source() string {
	return fmt.Sprintf(`
%s%d
DECLARE
  channel text := %s;
BEGIN
  IF TG_OP <> 'INSERT' THEN
    PERFORM pg_notify(channel, OLD.agent_id);
  END IF;
  IF TG_OP <> 'DELETE' THEN
    PERFORM pg_notify(channel, NEW.agent_id);
  END IF;
  RETURN NULL;
END
`, mark, version, fmt.Sprintf(channel, "TG_TABLE_SCHEMA", "TG_TABLE_NAME"))
}

// IsOurs reports whether the body of a function is one of this package's, of whatever
// version.
func IsOurs(source string) bool { return strings.Contains(source, mark) }

// IsCurrent reports whether it is of this version or of a newer one.
func IsCurrent(source string) bool {
	_, rest, _ := strings.Cut(source, mark)
	number, _, _ := strings.Cut(rest, "\n")
	found, err := strconv.Atoi(number)

	return err == nil && found >= version
}

// CreateFunction is the SQL that makes the function of that quoted name, or replaces one
// that is ours.
func CreateFunction(name string, replace bool) string {
	create := "CREATE FUNCTION "
	if replace {
		create = "CREATE OR REPLACE FUNCTION "
	}

	return create + name + "() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $legion$" + Source() + "$legion$"
}

// CreateTriggers is the SQL that makes the triggers of the table, or replaces them. Both
// names are quoted.
//
// What tells a change is cheap to compare: every write of this module's stamps
// updated_at, but for those that only take, move on or give up a slot, and for Prune.
// The whole row, with its usage and its state, is compared only where that has said
// nothing, and not for a lease that was renewed, the one write that comes all the time.
// *<> compares bytes, since an application may have columns of a type without equality.
func CreateTriggers(table, function string) []string {
	return []string{
		"CREATE OR REPLACE TRIGGER " + rowsTrigger + " AFTER INSERT OR DELETE ON " + table +
			"\nFOR EACH ROW EXECUTE FUNCTION " + function + "()",
		"CREATE OR REPLACE TRIGGER " + changesTrigger + " AFTER UPDATE ON " + table + ` FOR EACH ROW WHEN (
  (OLD.updated_at, OLD.status, OLD.run_id, OLD.reserved_tokens, OLD.deleted_at, OLD.lease_expires_at IS NULL) IS DISTINCT FROM
  (NEW.updated_at, NEW.status, NEW.run_id, NEW.reserved_tokens, NEW.deleted_at, NEW.lease_expires_at IS NULL)
  OR (OLD.lease_expires_at IS NOT DISTINCT FROM NEW.lease_expires_at AND OLD.* OPERATOR(pg_catalog.*<>) NEW.*)
) EXECUTE FUNCTION ` + function + "()",
	}
}

// Find is the SQL that finds the agents' table by its quoted name. Its row, if there is
// one, is the name of the channel and whether all triggers are there and fire.
func Find(table string) string {
	names := make([]string, len(Triggers()))
	for i, name := range Triggers() {
		names[i] = literal(name)
	}

	return fmt.Sprintf(`SELECT %s, (
  SELECT count(*) = %d FROM pg_catalog.pg_trigger WHERE tgrelid = class.oid AND tgname IN (%s) AND tgenabled IN ('O', 'A')
)
FROM pg_catalog.pg_class AS class JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
WHERE class.oid = pg_catalog.to_regclass(%s)`,
		fmt.Sprintf(channel, "namespace.nspname", "class.relname"), len(names), strings.Join(names, ", "), literal(table))
}

// Listen is the SQL that listens on the channel.
func Listen(channel string) string { return `LISTEN "` + channel + `"` }

// Listening is the SQL with one row if the session listens on the channel, and none if it
// does not.
func Listening(channel string) string {
	return "SELECT 1 FROM pg_catalog.pg_listening_channels() AS listening WHERE listening = " + literal(channel)
}

// literal quotes a text so that it means the same whatever
// standard_conforming_strings is.
func literal(text string) string {
	quoted := "'" + strings.NewReplacer(`'`, `''`, `\`, `\\`).Replace(text) + "'"
	if strings.Contains(text, `\`) {
		return " E" + quoted
	}

	return quoted
}
