package models_test

import (
	"encoding/json"
	"fmt"
	"time"

	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/models"
)

// A connection that shows SQL and runs none.
func openDryRun() (db *gorm.DB, closeDB func()) {
	db, err := gorm.Open(postgres.Open("host=localhost"), &gorm.Config{DryRun: true, DisableAutomaticPing: true})
	if err != nil {
		panic(err)
	}

	pool, err := db.DB()
	if err != nil {
		panic(err)
	}

	return db, func() { _ = pool.Close() }
}

func ExampleJSONContains() {
	db, closeDB := openDryRun()
	defer closeDB()

	var agents []models.LegionAgent

	query := db.
		Where(models.JSONContains("metadata", map[string]any{"tenant": "acme"})).
		Not(models.JSONContains("metadata", map[string]any{"ip": "203.0.113.42"})).
		Find(&agents)

	fmt.Println(query.Statement.SQL.String())
	fmt.Println(query.Statement.Vars...)

	// Output:
	// SELECT * FROM "legion_agents" WHERE "metadata" @> $1::jsonb AND NOT ("metadata" @> $2::jsonb) AND "legion_agents"."deleted_at" IS NULL
	// {"tenant":"acme"} {"ip":"203.0.113.42"}
}

func ExampleUsage() {
	document, err := json.Marshal(models.Usage{
		ID:           "request-7",
		At:           time.Date(2024, time.February, 29, 12, 0, 0, 0, time.UTC),
		InputTokens:  1200,
		OutputTokens: 34,
		Model:        "large",
		Extra:        map[string]any{"region": "eu"},
	})
	if err != nil {
		panic(err)
	}

	fmt.Println(string(document))

	// Output:
	// {"id":"request-7","at":1709208000000,"total_tokens":1234,"input_tokens":1200,"output_tokens":34,"model":"large","region":"eu"}
}

// What an application wrote itself is read as the limiter counts it.
func ExampleUsage_UnmarshalJSON() {
	var usage models.Usage
	if err := json.Unmarshal([]byte(`{"total_tokens": 12.5, "evals": "three", "region": "eu"}`), &usage); err != nil {
		panic(err)
	}

	fmt.Println(usage.TotalTokens, usage.Evals, usage.Extra["region"])

	// Output:
	// 13 0 eu
}

func ExampleUsage_Validate() {
	fmt.Println(models.Usage{TotalTokens: -5}.Validate())

	// Output:
	// legion: invalid usage: TotalTokens is negative: record what was consumed, at least 0
}
