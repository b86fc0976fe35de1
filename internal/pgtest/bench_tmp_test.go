package pgtest
import ("testing";"time";"context";"github.com/jackc/pgx/v5";"os";"strings";"database/sql")
func TestConnectCost(t *testing.T) {
	s := Shared(t)
	dsn := s.DSN("")
	folder := s.details.Folder
	measure := func(name string) {
		best := time.Hour; var total time.Duration
		for range 100 { b := time.Now(); c, err := pgx.Connect(context.Background(), dsn); if err != nil { t.Fatal(err) }; d := time.Since(b); total += d; best = min(best,d); c.Close(context.Background()) }
		t.Log(name, "mean", total/100, "best", best)
	}
	measure("scram")
	admin, _ := sql.Open("pgx", dsn); defer admin.Close()
	for _, m := range []string{"password","trust"} {
	b, _ := os.ReadFile(folder+"/data/pg_hba.conf")
	b = []byte(strings.ReplaceAll(strings.ReplaceAll(string(b), "scram-sha-256", m), "   password", "   "+m))
	os.WriteFile(folder+"/data/pg_hba.conf", b, 0600)
	admin.Exec("select pg_reload_conf()"); time.Sleep(200*time.Millisecond)
	measure(m)
	}
}
