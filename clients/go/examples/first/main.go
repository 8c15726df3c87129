// The first example of README.md: an agent is told something, and remembers it.
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	kvasir "kvasir.org/client"
)

func main() {
	engine, err := kvasir.Dial("unix:" + os.Getenv("HOME") + "/.kvasir/run/engine.sock") // what `kvasir up` listens on
	if err != nil {
		log.Fatal(err)
	}
	defer engine.Close()
	turn := kvasir.Turn{Agent: "ada", Append: kvasir.Conversation(kvasir.User("My name is Anna. What is my name?"))}
	reply, err := engine.Reply(context.Background(), turn)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(reply.Text(), reply.Started.GetCachedTokens())
}
