package driver

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestValidate(t *testing.T) {
	s := NewScript("return 1")
	for _, tc := range []struct {
		keys []string
		ok   bool
	}{
		{nil, false},
		{[]string{"a"}, true},
		{[]string{""}, true},
		{[]string{"a", "a"}, true},
		{[]string{"a", "b"}, false},
		{[]string{"{a}1", "{a}2", "x{a}"}, true},
		{[]string{"{a}1", "a"}, true}, // the tag is what is hashed
		{[]string{"{a}1", "{b}1"}, false},
		{[]string{"{}a", "{}b"}, false}, // an empty tag is none
		{[]string{"{a", "{a}"}, false},
		{[]string{"{{a}}", "{{a}b"}, true},
		{[]string{"}a{b}", "b"}, true},
	} {
		err := Cmd{Script: s, Keys: tc.keys}.Validate()
		if (err == nil) != tc.ok || err != nil && !errors.Is(err, ErrPermanent) {
			t.Errorf("keys %q: error %v, want ok = %v", tc.keys, err, tc.ok)
		}
	}
	if err := (Cmd{Keys: []string{"a"}}).Validate(); !errors.Is(err, ErrPermanent) {
		t.Errorf("no script: error %v, want ErrPermanent", err)
	}
}

func TestReplyOf(t *testing.T) {
	for _, v := range []any{nil, true, 1.5, 7, []any{int64(1), nil}, []any{[]any{}}, []string{"a"}, map[string]any{}, []any{errors.New("x")}} {
		if _, err := ReplyOf(v); err == nil {
			t.Errorf("ReplyOf(%#v) succeeded", v)
		}
	}
	r, err := ReplyOf([]any{int64(1), "a"})
	if err != nil {
		t.Fatal(err)
	}
	n, isInt := r.Int(0)
	s, isStr := r.Str(1)
	if r.Len() != 2 || n != 1 || !isInt || s != "a" || !isStr {
		t.Errorf("ReplyOf of an array: %v", r)
	}
	for _, i := range []int{-1, 1, 2} {
		if _, ok := r.Int(i); ok {
			t.Errorf("Int(%d) found something", i)
		}
	}
	for _, i := range []int{-1, 0, 2} {
		if _, ok := r.Str(i); ok {
			t.Errorf("Str(%d) found something", i)
		}
	}
	for _, v := range []any{int64(3), "x"} {
		if r, err := ReplyOf(v); err != nil || r.Len() != 1 {
			t.Errorf("ReplyOf(%v) = %v, %v", v, r, err)
		}
	}
}

func TestScriptSHA1(t *testing.T) {
	const src, want = "return 1", "e0e1f9fabfc9d4800c877a703b823ac0578ff8db"
	if s := NewScript(src); s.Src() != src || s.SHA1() != want {
		t.Errorf("script %q has digest %q, want %q", s.Src(), s.SHA1(), want)
	}
}

// The texts are what servers and miniredis send.
func TestClassify(t *testing.T) {
	for _, tc := range []struct {
		text  string
		class error // nil: a ServerError
		code  string
	}{
		{"LOADING Redis is loading the dataset in memory", ErrNotExecuted, ""},
		{"CLUSTERDOWN Hash slot not served", ErrNotExecuted, ""},
		{"TRYAGAIN Multiple keys request during rehashing of slot", ErrNotExecuted, ""},
		{"MOVED 1 127.0.0.1:1", ErrNotExecuted, ""},
		{"ERR max number of clients reached", ErrNotExecuted, ""},
		{"max number of clients reached", ErrNotExecuted, ""},
		{"NOAUTH Authentication required.", ErrPermanent, ""},
		{"WRONGPASS invalid username-password pair or user is disabled.", ErrPermanent, ""},
		{"NOPERM this user has no permissions to run the 'evalsha' command", ErrPermanent, ""},
		{"ERR The user executing the script can't run this command or subcommand script: x, on @user_script:1.", ErrPermanent, ""},
		{"WRONGTYPE Operation against a key holding the wrong kind of value script: x, on @user_script:2.", ErrPermanent, ""},
		{"ERR Error compiling script (new function): :1: WRONGTYPE Operation against", ErrPermanent, ""},
		{"CROSSSLOT Keys in request don't hash to the same slot", ErrPermanent, ""},
		{"ERR unknown command 'EVALSHA', with args beginning with: ", ErrPermanent, ""},
		{"OOM command not allowed when used memory > 'maxmemory'. script: x, on @user_script:1.", nil, "OOM"},
		{"READONLY You can't write against a read only replica. script: x, on @user_script:1.", nil, "READONLY"},
		{"ERR Error running script (call to f_x): @user_script:1: OOM command not allowed", nil, "OOM"},
		{"ERR syntax error", nil, "ERR"},
		{"some words", nil, "ERR"},
		{"", nil, "ERR"},
	} {
		cause := errors.New("the client's")
		err := Classify(tc.text, cause)
		if !errors.Is(err, cause) {
			t.Errorf("%q: %v does not lead to its cause", tc.text, err)
		}
		var server *ServerError
		isServer := errors.As(err, &server)
		if tc.class != nil {
			if !errors.Is(err, tc.class) || isServer {
				t.Errorf("%q is %v, want %v", tc.text, err, tc.class)
			}
			continue
		}
		if !isServer || server.Code != tc.code || server.Permanent() {
			t.Errorf("%q is %v, want a ServerError with code %s", tc.text, err, tc.code)
		}
	}
}

func TestEventKindString(t *testing.T) {
	seen := map[string]bool{}
	for k := EventKind(0); k <= Down+1; k++ {
		seen[fmt.Sprint(k)] = true
	}
	if len(seen) != int(Down)+2 {
		t.Errorf("kinds share names: %v", seen)
	}
}

func FuzzClassify(f *testing.F) {
	for _, text := range []string{"OOM x", "ERR MOVED 1 a", "-NOPERM", "", "\xff\x00", "ERR ERR ERR"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		classes := []bool{false, false, false}
		err := Classify(text, errors.New("cause"))
		for i, class := range []error{ErrNotExecuted, ErrUnknown, ErrPermanent} {
			classes[i] = errors.Is(err, class)
		}
		var server *ServerError
		classes = append(classes, errors.As(err, &server))
		if n := len(slices.DeleteFunc(classes, func(is bool) bool { return !is })); n != 1 {
			t.Errorf("%q is of %d classes", text, n)
		}
		if code := Code(text); code == "" || strings.ContainsAny(code, " \r\n") {
			t.Errorf("Code(%q) = %q", text, code)
		}
	})
}
