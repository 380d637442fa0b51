//! Parses tokens into a program by Jinja2's grammar: the same precedences, and tuples without
//! parentheses in the same places. Nesting is counted on the way down, so that a hostile source
//! causes an error and not a stack overflow.

use super::ast::{
    Body, CallArguments, Command, Expression, ExpressionKind, Literal, Loop, Macro, NameId, Statement, Target, Uses,
};
use super::lexer::{self, Token};
use super::value::Value;
use super::{Fault, NESTING_MAX, Result, limit, number};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A template ready to run.
#[derive(Debug)]
pub(in crate::data) struct Program {
    pub(super) body: Body,
    pub(super) names: Vec<Arc<str>>,
    marked: bool,
}

impl Program {
    pub(in crate::data) fn parse(source: &str) -> Result<Self> {
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        // One line break at the end is not part of the text.
        let source = source.strip_suffix('\n').unwrap_or(&source);
        let tokens = lexer::tokens(source)?;
        let mut parser =
            Parser { tokens, at: 0, depth: 0, names: BTreeMap::new(), uses: Uses::default(), marked: false };
        let body = parser.body(&[])?;
        let mut names = vec![Arc::from(""); parser.names.len()];
        for (name, id) in parser.names {
            names[id as usize] = name;
        }
        Ok(Self { body, names, marked: parser.marked })
    }

    /// Whether there are `{% generation %}` blocks.
    pub(in crate::data) fn marked(&self) -> bool {
        self.marked
    }
}

struct Parser {
    tokens: Vec<(Token, usize)>,
    at: usize,
    depth: usize,
    names: BTreeMap<Arc<str>, NameId>,
    uses: Uses,
    marked: bool,
}

impl Parser {
    fn current(&self) -> &Token {
        &self.tokens[self.at].0
    }

    fn line(&self) -> usize {
        self.tokens[self.at].1
    }

    fn step(&mut self) -> Token {
        let token = self.tokens[self.at].0.clone();
        self.at = (self.at + 1).min(self.tokens.len() - 1);
        token
    }

    fn fail<T>(&self, why: impl Into<String>) -> Result<T> {
        Err(Fault::Error { line: self.line(), why: why.into() })
    }

    fn is(&self, operator: &str) -> bool {
        matches!(self.current(), Token::Operator(found) if *found == operator)
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.current(), Token::Name(found) if found == name)
    }

    fn skip(&mut self, operator: &str) -> bool {
        let found = self.is(operator);
        self.at += usize::from(found);
        found
    }

    fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        self.at += usize::from(found);
        found
    }

    fn describe(&self) -> String {
        match self.current() {
            Token::Name(name) => name.escape_debug().to_string(),
            Token::Operator(operator) => (*operator).to_owned(),
            Token::Text(_) => "string".into(),
            Token::Integer(_) | Token::Float(_) => "number".into(),
            Token::CloseBlock => "end of statement block".into(),
            Token::CloseVariable => "end of print statement".into(),
            _ => "end of template".into(),
        }
    }

    fn expect(&mut self, operator: &str) -> Result<()> {
        if self.skip(operator) {
            Ok(())
        } else {
            self.fail(format!("expected '{operator}', got '{}'", self.describe()))
        }
    }

    fn expect_name(&mut self, name: &str) -> Result<()> {
        if self.skip_name(name) { Ok(()) } else { self.fail(format!("expected '{name}', got '{}'", self.describe())) }
    }

    fn name(&mut self) -> Result<String> {
        match self.current() {
            Token::Name(name) => {
                let name = name.clone();
                self.at += 1;
                Ok(name)
            }
            _ => self.fail(format!("expected a name, got '{}'", self.describe())),
        }
    }

    fn id(&mut self, name: &str) -> NameId {
        match name {
            "caller" => self.uses.caller = true,
            "varargs" => self.uses.varargs = true,
            "kwargs" => self.uses.kwargs = true,
            _ => {}
        }
        let next = self.names.len() as NameId;
        *self.names.entry(Arc::from(name)).or_insert(next)
    }

    /// Parses one level deeper.
    fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth >= NESTING_MAX {
            return limit(format!("line {}: it is nested more than {NESTING_MAX} levels deep", self.line()));
        }
        self.depth += 1;
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }

    /// Statements up to a tag with one of the names, or to the end if there are none. The tag's
    /// name is then the current token.
    fn body(&mut self, ends: &[&str]) -> Result<Body> {
        let mut body = Body::new();
        loop {
            let line = self.line();
            match self.step() {
                Token::Data(text) if text.is_empty() => {}
                Token::Data(text) => body.push(Statement { line, kind: Command::Data(text) }),
                Token::OpenVariable => {
                    let value = self.tuple(true, false)?;
                    if *self.current() != Token::CloseVariable {
                        return self.fail(format!("expected 'end of print statement', got '{}'", self.describe()));
                    }
                    self.at += 1;
                    body.push(Statement { line, kind: Command::Print(value) });
                }
                Token::OpenBlock => {
                    if ends.iter().any(|end| self.is_name(end)) {
                        return Ok(body);
                    }
                    self.nested(|parser| parser.statement(line, &mut body))?;
                    self.close()?;
                }
                _ if ends.is_empty() => return Ok(body),
                _ => return self.fail(format!("unexpected end of template, expected {}", ends.join(" or "))),
            }
        }
    }

    fn close(&mut self) -> Result<()> {
        if *self.current() != Token::CloseBlock {
            return self.fail(format!("expected 'end of statement block', got '{}'", self.describe()));
        }
        self.at += 1;
        Ok(())
    }

    /// The end of an opening tag, and the statements up to one of the ends.
    fn block(&mut self, ends: &[&str]) -> Result<Body> {
        self.skip(":");
        self.close()?;
        self.body(ends)
    }

    /// Like [`Self::block`] with one end, which is consumed.
    fn whole_block(&mut self, end: &str) -> Result<Body> {
        let body = self.block(&[end])?;
        self.at += 1;
        Ok(body)
    }

    fn statement(&mut self, line: usize, body: &mut Body) -> Result<()> {
        let name = self.name()?;
        let kind = match name.as_str() {
            "if" => self.condition()?,
            "for" => self.loops()?,
            "set" => self.set()?,
            "with" => self.with()?,
            "macro" => {
                let name = self.name()?;
                let id = self.id(&name);
                let parameters = self.signature()?;
                Command::Macro(id, self.macro_body(name, parameters, "endmacro")?)
            }
            "call" => {
                let parameters = if self.is("(") { self.signature()? } else { Vec::new() };
                let call = self.expression(true)?;
                if !matches!(call.kind, ExpressionKind::Call(..)) {
                    return self.fail("expected call");
                }
                Command::CallBlock { call, block: self.macro_body("caller".into(), parameters, "endcall")? }
            }
            "filter" => {
                let filter = self.filters(None, true)?;
                Command::FilterBlock(filter, self.whole_block("endfilter")?)
            }
            "generation" => {
                self.marked = true;
                Command::Generation(self.whole_block("endgeneration")?)
            }
            "print" => {
                while *self.current() != Token::CloseBlock {
                    let value = self.expression(true)?;
                    body.push(Statement { line, kind: Command::Print(value) });
                    if *self.current() != Token::CloseBlock {
                        self.expect(",")?;
                    }
                }
                return Ok(());
            }
            "break" => Command::Break,
            "continue" => Command::Continue,
            "block" | "extends" | "include" | "import" | "from" | "autoescape" => {
                return self.fail(format!("the tag '{name}' is not supported in chat templates"));
            }
            _ => return self.fail(format!("Encountered unknown tag '{}'", name.escape_debug())),
        };
        body.push(Statement { line, kind });
        Ok(())
    }

    fn condition(&mut self) -> Result<Command> {
        let mut branches = Vec::new();
        loop {
            let test = self.tuple(false, false)?;
            branches.push((test, self.block(&["elif", "else", "endif"])?));
            if self.skip_name("elif") {
                continue;
            }
            let otherwise = if self.skip_name("else") { self.block(&["endif"])? } else { Body::new() };
            self.at += 1;
            return Ok(Command::If { branches, otherwise });
        }
    }

    fn loops(&mut self) -> Result<Command> {
        let target = self.target(false)?;
        self.expect_name("in")?;
        let items = self.tuple(false, false)?;
        let condition = if self.skip_name("if") { Some(self.expression(true)?) } else { None };
        let recursive = self.skip_name("recursive");
        let body = self.block(&["endfor", "else"])?;
        let otherwise = if self.skip_name("else") { self.block(&["endfor"])? } else { Body::new() };
        self.at += 1;
        self.id("loop");
        Ok(Command::For(Loop { target, items, condition, recursive, body, otherwise }))
    }

    fn set(&mut self) -> Result<Command> {
        let target = self.target(true)?;
        if self.skip("=") {
            return Ok(Command::Set(target, self.tuple(true, false)?));
        }
        let filter = if self.is("|") { Some(self.filters(None, false)?) } else { None };
        Ok(Command::SetBlock(target, filter, self.whole_block("endset")?))
    }

    fn with(&mut self) -> Result<Command> {
        let mut values = Vec::new();
        while *self.current() != Token::CloseBlock {
            if !values.is_empty() {
                self.expect(",")?;
            }
            let target = self.target(false)?;
            self.expect("=")?;
            values.push((target, self.expression(true)?));
        }
        Ok(Command::With(values, self.whole_block("endwith")?))
    }

    fn signature(&mut self) -> Result<Vec<(NameId, Option<Expression>)>> {
        let mut parameters: Vec<(NameId, Option<Expression>)> = Vec::new();
        self.expect("(")?;
        while !self.is(")") {
            if !parameters.is_empty() {
                self.expect(",")?;
            }
            let name = self.name()?;
            let id = self.id(&name);
            let default = if self.skip("=") { Some(self.expression(true)?) } else { None };
            if default.is_none() && parameters.last().is_some_and(|(_, default)| default.is_some()) {
                return self.fail("non-default argument follows default argument");
            }
            parameters.push((id, default));
        }
        self.expect(")")?;
        Ok(parameters)
    }

    fn macro_body(&mut self, name: String, parameters: Vec<(NameId, Option<Expression>)>, end: &str) -> Result<Macro> {
        let outer = std::mem::take(&mut self.uses);
        let body = self.whole_block(end)?;
        let uses = std::mem::replace(&mut self.uses, outer);
        for name in ["caller", "varargs", "kwargs"] {
            let next = self.names.len() as NameId;
            self.names.entry(Arc::from(name)).or_insert(next);
        }
        Ok(Macro { name, parameters, body, uses })
    }

    /// A name, a namespace attribute if allowed, or a tuple of them.
    fn target(&mut self, namespaces: bool) -> Result<Target> {
        let mut targets = Vec::new();
        let mut tuple = false;
        loop {
            targets.push(self.one_target(namespaces)?);
            if !self.skip(",") {
                break;
            }
            tuple = true;
            if self.is("=") || self.is_name("in") {
                break;
            }
        }
        if tuple { Ok(Target::Tuple(targets)) } else { Ok(targets.swap_remove(0)) }
    }

    fn one_target(&mut self, namespaces: bool) -> Result<Target> {
        if self.skip("(") {
            let target = self.nested(|parser| parser.target(namespaces))?;
            self.expect(")")?;
            return Ok(target);
        }
        let name = self.name()?;
        if matches!(name.as_str(), "true" | "false" | "none" | "True" | "False" | "None") {
            return self.fail("can't assign to 'const'");
        }
        let id = self.id(&name);
        if namespaces && self.skip(".") {
            return Ok(Target::Attribute(id, Arc::from(self.name()?)));
        }
        Ok(Target::Name(id))
    }

    /// An expression, or a tuple of them with or without parentheses.
    fn tuple(&mut self, conditional: bool, parenthesised: bool) -> Result<Expression> {
        let mut items = Vec::new();
        let mut tuple = false;
        loop {
            let ends = matches!(self.current(), Token::CloseVariable | Token::CloseBlock) || self.is(")");
            if ends || (!items.is_empty() && self.is_name("recursive")) {
                break;
            }
            items.push(self.expression(conditional)?);
            if !self.skip(",") {
                break;
            }
            tuple = true;
        }
        match items.pop() {
            Some(item) if !tuple => Ok(item),
            None if !parenthesised => self.fail(format!("Expected an expression, got '{}'", self.describe())),
            last => {
                items.extend(last);
                Expression::new(ExpressionKind::Tuple(items))
            }
        }
    }

    fn expression(&mut self, conditional: bool) -> Result<Expression> {
        self.nested(|parser| {
            let mut value = parser.either()?;
            while conditional && parser.skip_name("if") {
                let test = Box::new(parser.either()?);
                let no = if parser.skip_name("else") { Some(Box::new(parser.expression(true)?)) } else { None };
                value = Expression::new(ExpressionKind::Condition { test, yes: Box::new(value), no })?;
            }
            Ok(value)
        })
    }

    fn either(&mut self) -> Result<Expression> {
        let mut left = self.both()?;
        while self.skip_name("or") {
            left = Expression::new(ExpressionKind::Or(Box::new(left), Box::new(self.both()?)))?;
        }
        Ok(left)
    }

    fn both(&mut self) -> Result<Expression> {
        let mut left = self.negation()?;
        while self.skip_name("and") {
            left = Expression::new(ExpressionKind::And(Box::new(left), Box::new(self.negation()?)))?;
        }
        Ok(left)
    }

    fn negation(&mut self) -> Result<Expression> {
        if self.skip_name("not") {
            let value = self.nested(Self::negation)?;
            return Expression::new(ExpressionKind::Not(Box::new(value)));
        }
        self.comparison()
    }

    fn comparison(&mut self) -> Result<Expression> {
        let left = self.sum()?;
        let mut others = Vec::new();
        loop {
            let operator = match self.current() {
                Token::Operator(operator @ ("==" | "!=" | "<" | "<=" | ">" | ">=")) => *operator,
                Token::Name(name) if name == "in" => "in",
                Token::Name(name) if name == "not" && self.follows_in() => {
                    self.at += 1;
                    "not in"
                }
                _ => break,
            };
            self.at += 1;
            others.push((operator, self.sum()?));
        }
        if others.is_empty() { Ok(left) } else { Expression::new(ExpressionKind::Compare(Box::new(left), others)) }
    }

    fn follows_in(&self) -> bool {
        matches!(self.tokens.get(self.at + 1), Some((Token::Name(name), _)) if name == "in")
    }

    fn chain(&mut self, operators: &[&'static str], next: fn(&mut Self) -> Result<Expression>) -> Result<Expression> {
        let mut left = next(self)?;
        while let Some(operator) = operators.iter().find(|operator| self.is(operator)) {
            self.at += 1;
            left = Expression::new(ExpressionKind::Binary(operator, Box::new(left), Box::new(next(self)?)))?;
        }
        Ok(left)
    }

    fn sum(&mut self) -> Result<Expression> {
        self.chain(&["+", "-"], Self::concat)
    }

    fn concat(&mut self) -> Result<Expression> {
        let first = self.product()?;
        if !self.is("~") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.skip("~") {
            items.push(self.product()?);
        }
        Expression::new(ExpressionKind::Concat(items))
    }

    fn product(&mut self) -> Result<Expression> {
        self.chain(&["*", "/", "//", "%"], Self::power)
    }

    fn power(&mut self) -> Result<Expression> {
        self.chain(&["**"], |parser| parser.unary(true))
    }

    fn unary(&mut self, filters: bool) -> Result<Expression> {
        let value = if self.skip("-") {
            let value = self.nested(|parser| parser.unary(false))?;
            Expression::new(ExpressionKind::Negative(Box::new(value)))?
        } else if self.skip("+") {
            let value = self.nested(|parser| parser.unary(false))?;
            Expression::new(ExpressionKind::Positive(Box::new(value)))?
        } else {
            self.primary()?
        };
        let mut value = self.postfix(value)?;
        if !filters {
            return Ok(value);
        }
        loop {
            value = if self.is("|") {
                self.filters(Some(value), false)?
            } else if self.is_name("is") {
                self.test(value)?
            } else if self.is("(") {
                self.call(value)?
            } else {
                return Ok(value);
            };
        }
    }

    fn primary(&mut self) -> Result<Expression> {
        let literal = match self.current().clone() {
            Token::Name(name) => {
                self.at += 1;
                match name.as_str() {
                    "true" | "True" => Literal::Bool(true),
                    "false" | "False" => Literal::Bool(false),
                    "none" | "None" => Literal::None,
                    _ => return Expression::new(ExpressionKind::Name(self.id(&name))),
                }
            }
            Token::Text(mut text) => {
                self.at += 1;
                while let Token::Text(more) = self.current() {
                    text.push_str(more);
                    self.at += 1;
                }
                Literal::Text(Arc::from(text))
            }
            Token::Integer(digits) => match number::integer(&digits) {
                Some(Value::Int(number)) => {
                    self.at += 1;
                    Literal::Int(number)
                }
                Some(Value::Big(digits)) => {
                    self.at += 1;
                    Literal::Big(digits)
                }
                _ => return self.fail("an integer of too many digits"),
            },
            Token::Float(float) => {
                self.at += 1;
                Literal::Float(float)
            }
            Token::Operator("(") => {
                self.at += 1;
                let value = self.nested(|parser| parser.tuple(true, true))?;
                self.expect(")")?;
                return Ok(value);
            }
            Token::Operator("[") => {
                self.at += 1;
                return self.nested(Self::list);
            }
            Token::Operator("{") => {
                self.at += 1;
                return self.nested(Self::dict);
            }
            _ => return self.fail(format!("unexpected '{}'", self.describe())),
        };
        Expression::new(ExpressionKind::Literal(literal))
    }

    fn list(&mut self) -> Result<Expression> {
        let mut items = Vec::new();
        while !self.is("]") {
            items.push(self.expression(true)?);
            if !self.is("]") {
                self.expect(",")?;
            }
        }
        self.at += 1;
        Expression::new(ExpressionKind::List(items))
    }

    fn dict(&mut self) -> Result<Expression> {
        let mut entries = Vec::new();
        while !self.is("}") {
            let key = self.expression(true)?;
            self.expect(":")?;
            entries.push((key, self.expression(true)?));
            if !self.is("}") {
                self.expect(",")?;
            }
        }
        self.at += 1;
        Expression::new(ExpressionKind::Dict(entries))
    }

    fn postfix(&mut self, mut value: Expression) -> Result<Expression> {
        loop {
            value = if self.skip(".") {
                match self.step() {
                    Token::Name(name) => Expression::new(ExpressionKind::Attribute(Box::new(value), Arc::from(name)))?,
                    Token::Integer(digits) => {
                        let index = Literal::Int(digits.parse().unwrap_or(i128::MAX));
                        let index = Expression::new(ExpressionKind::Literal(index))?;
                        Expression::new(ExpressionKind::Item(Box::new(value), Box::new(index)))?
                    }
                    _ => return self.fail("expected name or number"),
                }
            } else if self.skip("[") {
                self.nested(|parser| parser.subscript(value))?
            } else if self.is("(") {
                self.call(value)?
            } else {
                return Ok(value);
            };
        }
    }

    fn subscript(&mut self, value: Expression) -> Result<Expression> {
        let mut bounds = [None, None, None];
        let mut colons = 0;
        loop {
            if self.skip("]") {
                break;
            }
            if self.skip(":") {
                colons += 1;
            } else if colons < 3 && bounds[colons].is_none() {
                bounds[colons] = Some(Box::new(self.expression(true)?));
            } else {
                return self.fail("expected subscript expression");
            }
            if colons > 2 || self.is(",") {
                return self.fail("expected subscript expression");
            }
        }
        match bounds {
            [Some(index), None, None] if colons == 0 => Expression::new(ExpressionKind::Item(Box::new(value), index)),
            _ if colons == 0 => self.fail("expected subscript expression"),
            bounds => Expression::new(ExpressionKind::Slice(Box::new(value), bounds)),
        }
    }

    fn call(&mut self, value: Expression) -> Result<Expression> {
        let arguments = self.nested(Self::arguments)?;
        Expression::new(ExpressionKind::Call(Box::new(value), arguments))
    }

    fn arguments(&mut self) -> Result<CallArguments> {
        let mut arguments = CallArguments::default();
        self.expect("(")?;
        while !self.is(")") {
            let named = matches!(self.current(), Token::Name(_))
                && matches!(self.tokens.get(self.at + 1), Some((Token::Operator("="), _)));
            let open = arguments.more_named.is_none();
            if open && arguments.more.is_none() && self.skip("*") {
                arguments.more = Some(Box::new(self.expression(true)?));
            } else if open && self.skip("**") {
                arguments.more_named = Some(Box::new(self.expression(true)?));
            } else if open && named {
                let name = self.name()?;
                self.at += 1;
                arguments.named.push((Arc::from(name), self.expression(true)?));
            } else if open && arguments.more.is_none() && arguments.named.is_empty() {
                arguments.positional.push(self.expression(true)?);
            } else {
                return self.fail("invalid syntax for function call expression");
            }
            if !self.is(")") {
                self.expect(",")?;
            }
        }
        self.at += 1;
        Ok(arguments)
    }

    /// One or more filters; `inline` if the first has no bar before it.
    fn filters(&mut self, mut value: Option<Expression>, mut inline: bool) -> Result<Expression> {
        loop {
            if !inline && !self.skip("|") {
                return value.map_or_else(|| self.fail("expected a filter"), Ok);
            }
            inline = false;
            let name = self.dotted_name()?;
            let arguments = if self.is("(") { self.nested(Self::arguments)? } else { CallArguments::default() };
            value = Some(Expression::new(ExpressionKind::Filter(value.map(Box::new), Arc::from(name), arguments))?);
        }
    }

    fn dotted_name(&mut self) -> Result<String> {
        let mut name = self.name()?;
        while self.skip(".") {
            name = format!("{name}.{}", self.name()?);
        }
        Ok(name)
    }

    fn test(&mut self, value: Expression) -> Result<Expression> {
        self.at += 1;
        let negated = self.skip_name("not");
        let name = self.dotted_name()?;
        let mut arguments = CallArguments::default();
        let operand = match self.current() {
            Token::Name(name) => !matches!(name.as_str(), "else" | "or" | "and"),
            Token::Text(_) | Token::Integer(_) | Token::Float(_) => true,
            Token::Operator(operator) => matches!(*operator, "[" | "{"),
            _ => false,
        };
        if self.is("(") {
            arguments = self.nested(Self::arguments)?;
        } else if self.is_name("is") {
            return self.fail("You cannot chain multiple tests with is");
        } else if operand {
            let argument = self.primary()?;
            arguments.positional.push(self.postfix(argument)?);
        }
        let test = Expression::new(ExpressionKind::Test(Box::new(value), Arc::from(name), arguments))?;
        if negated { Expression::new(ExpressionKind::Not(Box::new(test))) } else { Ok(test) }
    }
}
