package scripts_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/e51fe0e6/dsync/internal/claim"
	"github.com/e51fe0e6/dsync/scripts"
)

// source is one script as it is sent, in the files that it is made of.
type source struct {
	name   string
	files  []string
	header string // comments in front of the first line of code, of all files
	code   string // without comments
}

func sources(t *testing.T) []source {
	t.Helper()
	all := []source{{name: "mutex", files: []string{"names.lua", "mutex.lua", "queue.lua"}}}
	for i := range all {
		for _, file := range all[i].files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			header, code := split(string(text))
			all[i].header += header
			all[i].code += code
		}
	}
	return all
}

// split takes a Lua file apart. "--" in a string would be taken for a comment; the scripts have none.
func split(text string) (header, code string) {
	inHeader := true
	var h, c strings.Builder
	for line := range strings.Lines(text) {
		before, comment, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "--")
		if inHeader = inHeader && strings.TrimSpace(before) == ""; inHeader {
			h.WriteString(comment + "\n")
		}
		c.WriteString(strings.TrimRight(before, " ") + "\n")
	}
	return h.String(), c.String()
}

// indexes returns the numbers n for which text has name[n].
func indexes(name, text string) []int {
	var found []int
	for _, m := range regexp.MustCompile(name+`\[(\d+)\]`).FindAllStringSubmatch(text, -1) {
		n, _ := strconv.Atoi(m[1])
		found = append(found, n)
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// documented returns the indexes that have a line of their own in a header.
func documented(name, header string) []int {
	var lines []string
	for line := range strings.Lines(header) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, name+"[") {
			lines = append(lines, strings.Fields(line)[0])
		}
	}
	return indexes(name, strings.Join(lines, "\n"))
}

func TestHeadersDocumentEveryIndexThatIsUsed(t *testing.T) {
	for _, s := range sources(t) {
		for _, name := range []string{"KEYS", "ARGV"} {
			told, used := documented(name, s.header), indexes(name, s.code)
			if !slices.Equal(told, used) {
				t.Errorf("%s: the header documents %s %v, the body uses %v", s.name, name, told, used)
			}
			if len(used) == 0 || used[len(used)-1] != len(used) {
				t.Errorf("%s: %s %v has gaps", s.name, name, used)
			}
			if named := regexp.MustCompile(name + `\[\D`).FindString(s.code); named != "" {
				t.Errorf("%s: %s... is not a literal index", s.name, named)
			}
		}
	}
}

// call is what one place in Go sends.
type call struct {
	at         string
	keys, args int
}

// calls finds the composite literals that have a Script: what Go sends to Redis.
func calls(t *testing.T, folder string) []call {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	var found []call
	set := token.NewFileSet()
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(set, file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			lit, ok := n.(*ast.CompositeLit)
			if !ok {
				return true
			}
			c := call{at: set.Position(lit.Pos()).String(), keys: -1, args: -1}
			isCall := false
			for _, element := range lit.Elts {
				pair, ok := element.(*ast.KeyValueExpr)
				if !ok {
					return true
				}
				name, _ := pair.Key.(*ast.Ident)
				list, _ := pair.Value.(*ast.CompositeLit)
				switch {
				case name == nil:
				case name.Name == "Script":
					isCall = true
				case name.Name == "Keys" && list != nil:
					c.keys = len(list.Elts)
				case name.Name == "Args" && list != nil:
					c.args = len(list.Elts)
				}
			}
			if isCall && c.args >= 0 {
				found = append(found, c)
			}
			return true
		})
	}
	return found
}

func TestGoSendsAsManyKeysAndArgumentsAsTheScriptReads(t *testing.T) {
	s := sources(t)[0]
	keys, args := len(indexes("KEYS", s.code)), len(indexes("ARGV", s.code))
	for _, folder := range []string{"../internal/session", "../dsync"} {
		found := calls(t, folder)
		if len(found) == 0 {
			t.Errorf("no call of a script found in %s", folder)
		}
		for _, c := range found {
			if c.keys != keys || c.args != args {
				t.Errorf("%s sends %d keys and %d arguments, want %d and %d", c.at, c.keys, c.args, keys, args)
			}
		}
	}
}

// luaConstants reads "local ONE, TWO = 1, 2".
func luaConstants(t *testing.T, code string) map[string]int {
	t.Helper()
	found := map[string]int{}
	for _, m := range regexp.MustCompile(`(?m)^local ([A-Z][A-Z_, ]*[A-Z]) *= *([-\d, ]+)$`).FindAllStringSubmatch(code, -1) {
		names, values := strings.Split(m[1], ","), strings.Split(m[2], ",")
		if len(names) != len(values) {
			t.Fatalf("%q has %d names and %d values", m[0], len(names), len(values))
		}
		for i, name := range names {
			n, err := strconv.Atoi(strings.TrimSpace(values[i]))
			if err != nil {
				t.Fatal(err)
			}
			found[strings.TrimSpace(name)] = n
		}
	}
	return found
}

// goConstants reads the integer constants of scripts.go.
func goConstants(t *testing.T) map[string]int {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), "scripts.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]int{}
	ast.Inspect(parsed, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || len(spec.Values) != len(spec.Names) {
			return true
		}
		for i, name := range spec.Names {
			sign, value := 1, spec.Values[i]
			if minus, ok := value.(*ast.UnaryExpr); ok && minus.Op == token.SUB {
				sign, value = -1, minus.X
			}
			if lit, ok := value.(*ast.BasicLit); ok && lit.Kind == token.INT {
				n, _ := strconv.Atoi(lit.Value)
				found[name.Name] = sign * n
			}
		}
		return true
	})
	return found
}

func TestStatusesAndFlagsHaveTheSameNumbersInLuaAndGo(t *testing.T) {
	lua := luaConstants(t, sources(t)[0].code)
	delete(lua, "RETENTION")
	delete(lua, "BUDGET")
	want := map[string]int{}
	for name, n := range goConstants(t) {
		switch name {
		case "Failed", "Group": // literals in the script, held by the tests of its replies
		case "Again":
			want["REPEAT"] = n // AGAIN is the flag
		case "NotYours":
			want["NOT_YOURS"] = n
		default:
			want[strings.ToUpper(strings.TrimPrefix(name, "Flag"))] = n
		}
	}
	if !maps.Equal(lua, want) {
		t.Errorf("the Lua has %v, scripts.go has %v", lua, want)
	}

	statuses := map[claim.Status]int{
		claim.NotYours: scripts.NotYours, claim.Granted: scripts.Granted, claim.Queued: scripts.Queued, claim.Busy: scripts.Busy,
		claim.Ended: scripts.Ended, claim.Gone: scripts.Gone, claim.Again: scripts.Again, claim.Renewed: scripts.Renewed,
		claim.Released: scripts.Released, claim.Withdrawn: scripts.Withdrawn,
	}
	for inClaim, n := range statuses {
		if int(inClaim) != n {
			t.Errorf("a status is %d in package claim and %d in the scripts", inClaim, n)
		}
	}
	if n := scripts.Withdrawn + 1; len(statuses) != n {
		t.Errorf("%d statuses compared, want %d", len(statuses), n)
	}
}

func TestVerbsAndLettersAreTheSameInLuaAndGo(t *testing.T) {
	code := sources(t)[0].code
	var verbs, letters []string
	table := regexp.MustCompile(`local verbs = \{([^}]*)\}`).FindStringSubmatch(code)
	if table == nil {
		t.Fatal("no table of verbs")
	}
	for _, m := range regexp.MustCompile(`(\w+) = \w+`).FindAllStringSubmatch(table[1], -1) {
		verbs = append(verbs, m[1])
	}
	for _, m := range regexp.MustCompile(`said\('(.)'\)`).FindAllStringSubmatch(code, -1) {
		letters = append(letters, m[1])
	}
	compare := func(what string, got, want []string) {
		slices.Sort(got)
		slices.Sort(want)
		if got = slices.Compact(got); !slices.Equal(got, want) {
			t.Errorf("%s: the Lua has %q, scripts.go has %q", what, got, want)
		}
	}
	compare("verbs", verbs, []string{scripts.Acquire, scripts.Renew, scripts.Release, scripts.Inspect})
	compare("letters", letters, []string{scripts.Wait, scripts.Repeated, scripts.Passable, scripts.Tombstone})
}

func TestCommandsAreTheACLLine(t *testing.T) {
	var called []string
	for _, s := range sources(t) {
		for _, m := range regexp.MustCompile(`redis\.p?call\('([A-Z]+)'(?:, '([A-Z]+)')?`).FindAllStringSubmatch(s.code, -1) {
			name := strings.ToLower(m[1])
			if name == "pubsub" {
				name += "|" + strings.ToLower(m[2])
			}
			called = append(called, name)
		}
	}
	slices.Sort(called)
	want := slices.Sorted(slices.Values(scripts.Commands))
	if got := slices.Compact(called); !reflect.DeepEqual(got, want) {
		t.Errorf("the scripts call %q, Commands says %q", got, want)
	}
}

// texts are the names in the scripts that hold text. Anything else that is joined to a text must go through int: a real server rounds
// numbers at 14 digits there, and miniredis does not.
var texts = []string{
	"key", "mine", "ask", "meta", "channels", "nonce", "token", "text", "word", "its", "by", "passable", "holder", "holder_meta",
}

// complaints says what must not be in a script.
func complaints(code string) []string {
	var found []string
	for _, ban := range []struct{ pattern, why string }{
		{`^#!`, "a shebang is a syntax error on miniredis, and denies what a full memory allows"},
		{`\btostring\b|'[^']*%[^d]|string\.format\('[^']*%d[^']+`, "numbers go through int"},
		{`redis\.p?call\([^']|redis\.p?call\([^)]*\bunpack\(`, "a command that cannot be told from its text"},
		{`'(NX|XX|GT|LT|CH|GET|WITHSCORE|PEXPIRETIME|EXPIRETIME|ZMPOP|LMPOP|BLPOP|FUNCTION|FCALL)'`, "not in 6.2, or not with all we run on"},
		{`\b(cjson|cmsgpack|bit|struct|os|goto|register_function|setresp|replicate_commands|error_reply|breakpoint)\b`, "not everywhere, or not flat"},
		{`[^\x00-\x7f]`, "not ASCII"},
	} {
		if m := regexp.MustCompile(ban.pattern).FindString(code); m != "" && !strings.Contains(m, "%S") {
			found = append(found, fmt.Sprintf("%q: %s", m, ban.why))
		}
	}
	operand := func(name, follows string) {
		if name == "" || follows == "(" && (name == "int" || name == "record" || name == "generation" || name == "channel") {
			return
		}
		if follows == "(" || !slices.Contains(texts, name) {
			found = append(found, fmt.Sprintf("%q is joined to a text: a number goes through int, a text's name into the list", name))
		}
	}
	for _, m := range regexp.MustCompile(`\.\.\s*(\w*)(\(?)`).FindAllStringSubmatch(code, -1) {
		operand(m[1], m[2])
	}
	for _, m := range regexp.MustCompile(`(\w+)\s*\.\.`).FindAllStringSubmatch(code, -1) {
		operand(m[1], "")
	}
	return found
}

func TestScriptsKeepToWhatEveryServerHas(t *testing.T) {
	patterns := regexp.MustCompile(`string\.match\([^)]*'\^[^\n]*|string\.format\('%d', n\)`) // patterns, and int itself
	for _, s := range sources(t) {
		for _, c := range complaints(patterns.ReplaceAllString(s.code, "''")) {
			t.Errorf("%s: %s", s.name, c)
		}
	}
	for _, bad := range []string{
		"#!lua name=x\n",
		"local a = tostring(n)",
		"local a = string.format('%s', n)",
		"local a = 'n' .. number",
		"local a = fence .. ' '",
		"local a = 'n' .. tonumber(x)",
		"redis.call(name, key)",
		"redis.call('PEXPIRE', key, 5, 'GT')",
		"redis.call('PEXPIRETIME', key)",
		"redis.call('SET', key, 'v', 'NX', 'GET')",
		"return cjson.encode({})",
		"-- \u00e9",
	} {
		if len(complaints(bad)) == 0 {
			t.Errorf("%q passes, and must not", bad)
		}
	}
}
